"""What spilled training costs on a GPU: a large transformer under caps, against the plain loop with all of the card's memory.

    python benchmarks/gpu_spill.py                      # one GPU, caps of 16 and 32 GiB; within 8 minutes
    python benchmarks/gpu_spill.py --caps 8 --depth 12
    python benchmarks/gpu_spill.py --devices cpu:1 --width 128 --depth 4 --length 64 --heads 4 --caps 0.07   # a rehearsal

Needs torch, rich and hydra_tune's own imports; no search library and no installation. A GPT of 1.24 billion parameters
(width 2048, 24 blocks, vocabulary 8192) is trained with AdamW in bfloat16 mixed precision, in batches of 8 sequences of 1024
tokens. Each arm is a process of its own: `resident`, a plain loop on the card; and the pool under each cap (`device_memory`),
where the card's allocator refuses more. A step is from its batch being drawn to the next one, with the device idle at both
moments; the first ones are left out.

`overlap` is the part of the copies' seconds in which no unit waited for a copy. The roofline is the longest of: what the
resident loop takes (plus a forward for each shard that computes its activations again), and the bytes that were really copied
over the bandwidth measured for large pinned copies, each direction apart. `of it` is the roofline over the step's seconds:
1.00 is all that the card and its link can give. Peaks are the pool's ledger and the allocator's own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - needs the path above

VOCABULARY = 8192
WARM_STEPS, NUM_STEPS = 3, 9
GIB = 1 << 30
COLUMNS = ("arm", "shards", "first step at", "s a step", "speed", "GB in", "GB out", "overlap", "roofline s", "of it",
           "peak GiB", "allocated GiB", "loss")  # fmt: skip


class Data:
    """The same batches in every arm; notes the time, and what `look` says, whenever one is drawn and the device is idle."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.look: Any = dict
        self.marks: list[float] = []
        self.seen: list[dict[str, float]] = []

    def draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(NUM_STEPS):
            ids = torch.randint(VOCABULARY, (self._options.batch, self._options.length + 1), generator=generator)
            self._mark()
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self._mark()

    def _mark(self) -> None:
        if is_cuda(self._options):
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        self.seen.append(self.look())

    @property
    def step_seconds(self) -> float:
        """The median of the steps that count."""
        return statistics.median(after - before for before, after in pairwise(self.marks[WARM_STEPS:]))

    def per_step(self, key: str) -> float:
        """By how much what `look` says grows in a step."""
        return (self.seen[-1][key] - self.seen[WARM_STEPS][key]) / (NUM_STEPS - WARM_STEPS)


def is_cuda(options: argparse.Namespace) -> bool:
    return bool(options.devices.startswith("cuda"))


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return transformer.Transformer(VOCABULARY, options.width, options.heads, options.depth, options.length)


def resident(options: argparse.Namespace) -> dict[str, Any]:
    """The plain loop, with all the memory there is; and what the link can do."""
    device = torch.device("cuda" if is_cuda(options) else "cpu")
    data = Data(options)
    module = build(options).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    losses: list[Tensor] = []
    for inputs, targets in data.draw():
        with torch.autocast(device.type, torch.bfloat16):
            loss = transformer.loss(module(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = {
        "step": data.step_seconds,
        "loss": torch.stack(losses).double().mean().item(),
        "parameters": sum(p.numel() for p in module.parameters()),
        "peak": torch.cuda.max_memory_allocated() if is_cuda(options) else 0,
    }
    del module, optimizer, loss
    return found | {"up": bandwidth(device, up=True), "down": bandwidth(device, up=False)}


def bandwidth(device: torch.device, *, up: bool) -> float:
    """Bytes a second of large copies between pinned memory and the device."""
    size = GIB if device.type == "cuda" else GIB // 16
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    data = torch.empty(size, dtype=torch.uint8, device=device)
    source, target = (host, data) if up else (data, host)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds[1:])


def capped(options: argparse.Namespace) -> dict[str, Any]:
    """The pool under a cap."""
    data = Data(options)
    task = TrainTask(
        model=partial(build, options),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        loss=transformer.loss,
        train=data.draw,
        precision="bfloat16",
        activations=options.activations,
    )
    began = time.perf_counter()
    with HydraExecutor(
        devices=options.devices,
        device_memory=int(options.cap * GIB),
        host_memory=int(options.host * GIB),
        max_concurrent=1,
        num_shards=options.shards,
        event_log=options.events,
    ) as pool:
        (name,) = pool.stats().devices
        data.look = lambda: _counts(pool.stats().devices[name])
        job = pool.submit(task)
        result = job.result()
        if result.error is not None:
            raise result.error
        peak = pool.stats().devices[name].peak_bytes
        num_shards = result.num_shards
    return {
        "step": data.step_seconds,
        "loss": result.metrics["train_loss"],
        "shards": num_shards,
        "first": data.marks[1] - began,
        "recomputed": 1 - 1 / num_shards if "recompute" in (result.activations or ()) else 0.0,
        "peak": peak,
        "allocated": torch.cuda.max_memory_allocated() if is_cuda(options) else 0,
        **{key: data.per_step(key) for key in ("in", "out", "waiting", "copying")},
    }


def _counts(device: Any) -> dict[str, float]:
    return {
        "in": device.bytes_in,
        "out": device.bytes_out,
        "waiting": device.waiting_seconds,
        "copying": device.copying_seconds,
    }


def start(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """One arm in a fresh process; says why where it fails."""
    command = [sys.executable, __file__, *sys.argv[1:], *more]
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not over after {options.limit:g} s"}
    if done.returncode:
        return {"failed": f"it ended with {done.returncode}, for the reason above"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(options: argparse.Namespace) -> int:
    """Run all arms and print the table."""
    console = Console(width=150)
    console.print(f"{machine(options)}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}")
    whole = start(options, "--arm", "resident")
    if "failed" in whole:
        console.print(f"resident: {whole['failed']}")
        return 1
    console.print(
        f"{whole['parameters']:,} parameters, {options.batch} x {options.length} tokens; large pinned copies "
        f"{whole['up'] / 1e9:.1f} GB/s up, {whole['down'] / 1e9:.1f} GB/s down"
    )
    table = Table(*COLUMNS)
    peak, loss = f"{whole['peak'] / GIB:.1f}", f"{whole['loss']:.5f}"
    _add(table, ["resident", "", "", f"{whole['step']:.3f}", "1.00", *[""] * 5, peak, "", loss])
    is_whole = True
    for cap in options.caps:
        found = start(options, "--arm", "pool", "--cap", str(cap))
        if "failed" in found:
            is_whole = False
            console.print(f"{cap:g} GiB: {found['failed']}")
        else:
            _add(table, [f"{cap:g} GiB", *_row(found, whole)])
    console.print(table)
    return 0 if is_whole else 1


def _add(table: Table, cells: list[str]) -> None:
    table.add_row(*cells)
    print("row: " + json.dumps(dict(zip(COLUMNS, cells, strict=True))), flush=True)


def _row(found: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    computing = whole["step"] * (1 + found["recomputed"] / 3)
    roofline = max(computing, found["in"] / whole["up"], found["out"] / whole["down"])
    overlap = 1 - found["waiting"] / found["copying"] if found["copying"] else 1.0
    return [
        str(found["shards"]),
        f"{found['first']:.0f} s",
        f"{found['step']:.3f}",
        f"{whole['step'] / found['step']:.2f}",
        f"{found['in'] / 1e9:.2f}",
        f"{found['out'] / 1e9:.2f}",
        f"{overlap:.2f}",
        f"{roofline:.3f}",
        f"{roofline / found['step']:.2f}",
        f"{found['peak'] / GIB:.1f}",
        f"{found['allocated'] / GIB:.1f}",
        f"{found['loss']:.5f}",
    ]


def machine(options: argparse.Namespace) -> str:
    if is_cuda(options):
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores, no GPU: a rehearsal, whose times say nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--caps", type=float, nargs="+", default=[32, 16], help="GiB")
    parser.add_argument("--host", type=float, default=100, help="GiB of host memory for the trial's state")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--activations", default="auto", choices=("auto", "keep", "recompute", "spill"))
    parser.add_argument(
        "--shards",
        type=lambda text: text if text == "tuned" else int(text),
        help="at least so many, or tuned: as many as move the fewest bytes; left out: as few as fit",
    )
    parser.add_argument("--limit", type=float, default=230, help="seconds of an arm")
    parser.add_argument("--events", type=Path, help="the event log of the last cap's pool")
    parser.add_argument("--arm", choices=("resident", "pool"), help="run only this one, in this process; prints JSON")
    parser.add_argument("--cap", type=float, default=0.0, help="of --arm pool")
    options = parser.parse_args()
    if options.arm is None:
        return show(options)
    print(json.dumps(resident(options) if options.arm == "resident" else capped(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
