"""The reference of parity: a plain PyTorch loop in a process of its own, with one intra-op thread.

Run as `python -m tests.parity.reference OUTPUT NAME:SEED ...` from the repository's root.
"""

import sys
from pathlib import Path

import torch

from hydra_tune.train.plain import train_plain
from tests.parity import models
from tests.parity.exact import without_seconds


def main(output: str, *specs: str) -> None:
    """Train each of the named tasks and save its losses, history, weights and optimizer state."""
    torch.set_num_threads(1)
    results = {}
    for spec in specs:
        name, seed = spec.split(":")
        result = train_plain(models.build(name, seed=int(seed)))
        results[spec] = {
            "losses": result.losses,
            "history": without_seconds(result.history),
            "state": dict(result.module.state_dict()),
            "optimizer": result.optimizer.state_dict(),
        }
    torch.save(results, Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
