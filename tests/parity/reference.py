"""The reference of parity: a plain PyTorch loop in a process of its own, with one intra-op thread.

Run as `python -m tests.parity.reference OUTPUT TASK ...` from the repository's root; a task is `NAME:SEED` of
`tests.parity.models`, or a spec of `tests.parity.registry`.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from hydra_tune.task import TrainTask
from hydra_tune.train.loop.reference_loop import train_plain
from tests.parity import models
from tests.parity.exact import without_seconds


def main(output: str, *specs: str) -> None:
    """Train each of the named tasks and save its losses, history, weights and optimizer state."""
    torch.set_num_threads(1)
    torch.save({spec: outcome(task_of(spec)) for spec in specs}, Path(output))


def task_of(spec: str) -> TrainTask:
    """The task of that name."""
    if "/" not in spec:
        name, seed = spec.split(":")
        return models.build(name, seed=int(seed))
    from tests.parity import registry  # noqa: PLC0415 - loads transformers, which takes seconds

    return registry.build(registry.Spec.parse(spec))


def outcome(task: TrainTask, device: str = "cpu") -> dict[str, Any]:
    """What training there gave; not every combination works in plain PyTorch."""
    try:
        return _train(task, device)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        return {"error": f"{type(error).__name__}: {error}"}


def _train(task: TrainTask, device: str) -> dict[str, Any]:
    result = train_plain(task, device=device)
    return {
        "losses": result.losses,
        "history": without_seconds(result.history),
        "state": dict(result.state_dict()),
        "optimizer": result.optimizer_state_dict(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
