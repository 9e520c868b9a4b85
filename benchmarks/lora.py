"""LoRA trials on one frozen base: what a shared base saves in host memory and in bytes loaded.

    python benchmarks/lora.py                  # some minutes, on one core
    python benchmarks/lora.py --trials 2 --steps 2

Trials of a Llama from config (110 MB, float32, random weights), adapters of ranks 4 to 32 on the attention's projections,
on one CPU device whose memory is a part of the base (`--budget`, 0.4). Each arm runs in a process of its own:

* plain: `train_plain`, one trial after the other;
* own bases: a pool, each trial with a base of its own (`base.module(copy=True)`);
* shared: a pool, and one base (`base.module()`);
* shared, by turns: the same with `policy="round_robin"`, by which the trials run a shard's units one after the other.

|W| is the bytes of the base. Counted once all trials have made their first report: parameters loaded to the device for each
trial-step, adapters included, and all other bytes, both ways; and the host memory that the pool counts for the trials (base,
adapters, their state, and the values between units). The set size is the highest proportional set size of the process,
mapped pages included, beyond its size before the base was built. It also has the memory of the CPU device itself, captures
and checks of plans, one model at a time, and what the allocator keeps. Exits with 1 if a pool's losses or adapters differ
from the plain loop's in one bit.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import EventStream, HydraExecutor, Reported, SharedModule, TrainTask, train_plain  # noqa: E402 - path above
from hydra_tune.pool.runtime.job_state import granted_bytes  # noqa: E402
from hydra_tune.train.trained import TrainingOutcome  # noqa: E402

ARMS = ("plain", "own bases", "shared", "shared, by turns")
RANKS = (4, 8, 16, 32)
VOCABULARY, TOKENS, BATCH = 8000, 16, 2
PATIENCE_SECONDS, SAMPLE_SECONDS = 600, 0.05


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        attn_implementation="eager",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Lora(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output and the adapter's, added."""
        adapted: torch.Tensor = self.inner(x) + functional.linear(functional.linear(x, self.down), self.up)
        return adapted


def with_lora(base: SharedModule, rank: int, *, owns: bool) -> nn.Module:
    model: Any = base.module(copy=owns)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name), rank))
    return model  # type: ignore[no-any-return]  # a model of another library


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def tasks(base: SharedModule, trials: int, steps: int, *, owns: bool) -> list[TrainTask]:
    tokens = torch.randint(VOCABULARY, (BATCH * steps, TOKENS), generator=torch.Generator().manual_seed(0))
    return [
        TrainTask(
            model=partial(with_lora, base, RANKS[number % len(RANKS)], owns=owns),
            param_groups=trained,
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            step=step,
            train=TensorDataset(tokens),
            batch_size=BATCH,
            epochs=1,
            report_every=1,
            seed=number,
        )
        for number in range(trials)
    ]


def digest(result: TrainingOutcome) -> str:
    """Return a digest of a trial's losses and of its trained parameters."""
    if result.error is not None:
        raise result.error
    content = hashlib.sha256(repr([report["train_loss"] for report in result.history]).encode())
    for parameter in trained(result.module()):
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()


@contextmanager
def measured(sizes: dict[str, int]) -> Iterator[None]:
    """Measure the highest proportional set size in the context, beyond the size before."""
    process, is_over = psutil.Process(), threading.Event()
    before = peak = process.memory_full_info().pss

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(SAMPLE_SECONDS):
            peak = max(peak, process.memory_full_info().pss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        sizes["host"] = peak - before


def moved(pool: HydraExecutor) -> tuple[int, int]:
    """Bytes of parameters loaded so far, and all other bytes, both ways."""
    (device,) = pool.stats().devices.values()
    loaded = device.bytes_in_by_kind.get("parameters", 0)
    return loaded, device.bytes_in + device.bytes_out - loaded


def run(arm: str, trials: int, steps: int, budget: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes: dict[str, int] = {}
    base_bytes = sum(parameter.nbytes for parameter in llama().parameters())
    with measured(sizes):
        base = SharedModule(llama)
        described = tasks(base, trials, steps, owns=arm == "own bases")
        began, cpu = time.perf_counter(), time.process_time()
        if arm == "plain":
            outcome: dict[str, Any] = {"digests": [digest(train_plain(each)) for each in described]}
        else:
            policy = "round_robin" if arm == "shared, by turns" else "lrtf"
            outcome = in_pool(described, int(budget * base_bytes), policy, steps)
        outcome |= {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    moved_bytes = [nbytes / base_bytes for nbytes in outcome.get("bytes", ())]
    counted = outcome.get("counted", 0) / base_bytes
    return outcome | {"host": sizes["host"] / base_bytes, "base": base_bytes, "moved": moved_bytes, "counted": counted}


def in_pool(described: list[TrainTask], memory: int, policy: str, steps: int) -> dict[str, Any]:
    events = EventStream()
    with HydraExecutor("cpu:1", memory, policy=policy, max_concurrent=len(described)) as pool:
        jobs = [pool.submit(each, events=events) for each in described]
        for _ in jobs:
            event = events.get(PATIENCE_SECONDS)
            if not isinstance(event, Reported):
                raise SystemExit(f"a trial ended before its first report: {event}")
        assert pool._pool is not None  # noqa: SLF001 - no public name for what is counted
        counted = granted_bytes(pool._pool._records.values())  # noqa: SLF001
        before, began = moved(pool), time.perf_counter()
        for job in jobs:
            job.proceed()
        num_reports = len(jobs) * (steps - 1)
        while num_reports:
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed()
                num_reports -= 1
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        trial_steps = len(jobs) * (steps - 1)
        return {
            "digests": [digest(result) for result in results],
            "shards": [result.num_shards for result in results],
            "counted": counted,
            "bytes": [(now - then) / trial_steps for then, now in zip(before, moved(pool), strict=True)],
            "steady": (time.perf_counter() - began) / trial_steps,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8, help="number of trials")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each trial, at least 2")
    parser.add_argument("--budget", type=float, default=0.4, help="memory of the device, as a part of the base")
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process, and print its figures as JSON")
    options = parser.parse_args()
    if options.arm is not None:
        print(json.dumps(run(options.arm, options.trials, options.steps, options.budget)))
        return 0
    arguments = [f"--{name}={getattr(options, name)}" for name in ("trials", "steps", "budget")]
    outcomes = {}
    for arm in ARMS:
        command = [sys.executable, __file__, *arguments, "--arm", arm]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{arm!r} failed:\n{ended.stderr}")
        outcomes[arm] = json.loads(ended.stdout.splitlines()[-1])
    table = Table(
        title=f"{options.trials} trials, |W| = {outcomes['plain']['base'] / 1e6:.0f} MB, budget {options.budget:.0%}"
    )
    heads = (
        "counted / |W|",
        "set size / |W|",
        "loaded / |W|",
        "other / |W|",
        "s a trial-step",
        "seconds",
        "CPU seconds",
        "equal",
    )
    for head in ("arm", "shards", *heads):
        table.add_column(head, justify="left" if head == "arm" else "right")
    is_equal = True
    for arm, outcome in outcomes.items():
        same = outcome["digests"] == outcomes["plain"]["digests"]
        is_equal &= same
        loaded = [f"{each:.2f}" for each in outcome["moved"]] or ["", ""]
        steady = f"{outcome['steady']:.2f}" if "steady" in outcome else ""
        shards = (
            "-".join(str(end) for end in sorted({min(outcome["shards"]), max(outcome["shards"])})) if loaded[0] else ""
        )
        times = (f"{outcome['seconds']:.0f}", f"{outcome['cpu']:.0f}")
        counted = f"{outcome['counted']:.2f}" if outcome["counted"] else ""
        table.add_row(arm, shards, counted, f"{outcome['host']:.1f}", *loaded, steady, *times, "yes" if same else "no")
    Console(width=140).print(table)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
