"""The pool on a GPU against the plain loop on that GPU, bit for bit: the models of `tests/parity`, with their features.

    python benchmarks/gpu_parity.py "own code"              # or "one shard", "two shards", "three shards", "a shard per layer"
    python benchmarks/gpu_parity.py "two shards" --devices cpu:1 --models mlp cnn   # a rehearsal

Both arms use deterministic kernels, full float32 and one process. The plain loop runs twice: where the two runs differ, the
model has an operator that is not reproducible on the GPU, and the row says so. Of each task there is a line `row: {...}`. Needs
transformers for some of the models. Ends with an error if any task differs or fails in the pool alone.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a matrix is first multiplied

import torch

OWN_CODE = "own code"
WRONG = ("differs", "failed")
MOST_TOLD = 200  # characters


def main():
    from tests.parity import cases, reference  # noqa: PLC0415 - load transformers, which takes seconds
    from tests.parity.observe import trained  # noqa: PLC0415
    from tests.parity.registry import build  # noqa: PLC0415

    options = asked()
    is_gpu = options.devices.startswith("cuda")
    prepare()
    specs, cut = chosen(cases, options.pool)
    specs = [spec for spec in specs if not options.models or spec.model in options.models]
    plain = options.devices.split(",")[0].partition(":")[0] + (":0" if is_gpu else "")
    expected = [[reference.outcome(build(spec), plain) for spec in specs] for _ in range(2)]
    found, _ = trained(
        specs,
        devices=options.devices,
        device_memory=options.memory,
        max_concurrent=4,
        event_log=options.events,
        **cut,
    )
    outcomes = []
    for spec, seen, one, again in zip(specs, found, *expected, strict=True):
        outcome, why = compared(seen, one, again)
        outcomes.append(outcome)
        row = {"model": spec.model, "feature": spec.feature, "optimizer": spec.optimizer, "cut": options.pool}
        print("row: " + json.dumps({**row, "outcome": outcome, "why": why[:MOST_TOLD]}), flush=True)
    return 1 if set(outcomes) & set(WRONG) else 0


def prepare():
    """Kernels that give the same numbers twice, wherever torch has some."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    warnings.simplefilter("ignore")  # of operators without deterministic kernels: the second plain run tells more


def chosen(cases, name):
    """Tasks, and options of the pool that trains them."""
    pools = {pool.name.partition(" on ")[0]: pool for pool in cases.pools()}
    if name == OWN_CODE:  # each model in its first pool, which is with another feature for each
        every = {spec.model: spec for pool in pools.values() for spec in pool.specs}
        return list(every.values()), {}
    return list(pools[name].specs), cases.CUTS[name]


def compared(seen, expected, again):
    """In a word, and why; the plain loop's second run says whether bits can be asked for."""
    from tests.parity.exact import differences  # noqa: PLC0415
    from tests.parity.observe import difference  # noqa: PLC0415

    error = seen.result.error
    if "error" in expected:
        both = "fails in both" if error is not None else "failed"
        return both, f"the plain loop: {expected['error']}"
    if error is not None:
        is_refused = type(error).__name__ == "TaskError"
        return ("refused" if is_refused else "failed"), f"{type(error).__name__}: {error}"
    if list(differences(expected, again)):
        return "not reproducible", "the plain loop differs from itself: " + next(differences(expected, again))
    found = difference(seen, expected)
    return ("differs", found[0]) if found else ("bitwise", "")


def asked():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pool", help=f"how models are cut: {OWN_CODE!r}, or a name of tests/parity/cases.py")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--memory", default="64MiB", help="of each device")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--events", type=Path, help="the pool's event log")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
