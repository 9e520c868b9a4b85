"""Sixteen BERTs that do not fit a GPU together, in one pool, beside a plain loop that trains one after the other.

    python benchmarks/gpu_pool.py                                    # one GPU, of which the pool may use 12 GiB
    python benchmarks/gpu_pool.py --devices cpu:1 --tiny --trials 4 --steps 4 --memory 6MiB --flying 4   # a rehearsal

BERT of 110 million parameters (transformers' `BertForSequenceClassification`, dropout included) in float32 with AdamW, batches
of 16 texts of 128 tokens. A trial's parameters and optimizer state are 1.3 GB, so each fits by itself, and 12 GiB hold half of
the sixteen. Seconds begin when trials are submitted, and end when the last is over: building the models, which the pool does
beside the GPU's work, is in them. The plain loop trains one trial, and would take as long for each of the others. Of each arm
there is a line `row: {...}`.
"""

import argparse
import gc
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed

import torch

from hydra_tune import HydraExecutor, TrainTask, train_plain

VOCABULARY, CLASSES, GIB = 30522, 4, 1 << 30
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def build(options):
    import transformers  # noqa: PLC0415 - takes seconds, and is not everywhere

    shape, vocabulary = (TINY, 1000) if options.tiny else (BASE, VOCABULARY)
    config = transformers.BertConfig(vocab_size=vocabulary, num_labels=CLASSES, **shape)
    return transformers.BertForSequenceClassification(config)


def draw(options, seed):
    """Batches of made-up texts."""
    generator = torch.Generator().manual_seed(seed)
    size, length = (2, 16) if options.tiny else (16, 128)
    for _ in range(options.steps):
        ids = torch.randint(1000, (size, length), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % CLASSES}


def loss(module, batch):
    return module(**batch).loss


def task(options, seed):
    return TrainTask(
        model=partial(build, options),
        optimizer=partial(torch.optim.AdamW, lr=1e-5 * (seed + 1)),
        train=partial(draw, options, seed),
        step=loss,
        seed=seed,
    )


def alone(options, place):
    """Seconds of one trial in the plain loop, and its result."""
    first = argparse.Namespace(**(vars(options) | {"steps": 1}))  # loads libraries, which both arms have then
    train_plain(task(first, 0), device=place)
    begun = time.perf_counter()
    result = train_plain(task(options, 0), device=place)
    seconds = time.perf_counter() - begun
    row = {
        "arm": "the plain loop, one after the other",
        "s in all": f"{seconds * options.trials:.1f}",
        "steps a second": f"{options.steps / seconds:.2f}",
        "speed": "1.00",
        "peak GiB": f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if place != "cpu" else "",
        "loss of the first": f"{result.metrics['train_loss']:.6f}",
    }
    print("row: " + json.dumps(row), flush=True)
    state = [p for group in result.optimizer_state_dict()["state"].values() for p in group.values()]
    held = sum(t.nbytes for t in (*result.state_dict().values(), *state) if isinstance(t, torch.Tensor))
    return seconds, held


def together(options, flying, seconds_alone, held):
    """The pool, with so many trials in flight."""
    begun = time.perf_counter()
    with HydraExecutor(
        options.devices, options.memory, max_concurrent=flying, event_log=options.events, host_memory=options.host
    ) as pool:
        results = pool.run([task(options, seed) for seed in range(options.trials)])
        seconds = time.perf_counter() - begun
        (device,) = pool.stats().devices.values()
    row = {
        "arm": f"the pool, {flying} in flight, {held * flying / GIB:.2g} GiB of state in {device.budget_bytes / GIB:.2g}",
        "s in all": f"{seconds:.1f}",
        "steps a second": f"{options.steps * options.trials / seconds:.2f}",
        "speed": f"{seconds_alone * options.trials / seconds:.2f}",
        "GB in": f"{device.bytes_in / 1e9:.3g}",
        "GB out": f"{device.bytes_out / 1e9:.3g}",
        "busy": f"{device.busy_seconds / seconds:.0%}",
        "waiting s": f"{device.waiting_seconds:.2f}",
        "overlap": f"{device.overlap:.2f}",
        "peak GiB": f"{device.peak_bytes / GIB:.2f}",
        "shards": " ".join(sorted({str(result.num_shards) for result in results})),
        "loss of the first": f"{results[0].metrics['train_loss']:.6f}",
    }
    print("row: " + json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cuda:0", help="one device")
    parser.add_argument("--memory", default="12GiB", help="that the pool may use")
    parser.add_argument("--host", help="host memory for the state of all trials; left out: 80% of what is free")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--flying", type=int, nargs="+", default=[16, 2], help="trials in flight, a run of the pool each"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--events", type=Path, help="the event log of the last pool")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = "cpu" if options.devices.startswith("cpu") else options.devices
    seconds, held = alone(options, place)
    gc.collect()
    if place != "cpu":
        torch.cuda.empty_cache()
    for flying in options.flying:
        together(options, flying, seconds, held)


if __name__ == "__main__":
    main()
