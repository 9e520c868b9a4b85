"""hydra-tune: hyperparameter search on one shared pool of devices.

Public names are imported on first use, so that `import hydra_tune` costs next to nothing. The package must not know any
tuner: integrations import the package, never the reverse. Read `task` and `executor` first, which are the interface,
then `train` and `pool`; `docs/contributing/architecture.md` follows a trial from file to file, and lists the packages in
the order in which they may import each other. `errors` has the public errors, and `moved` keeps old paths of modules alive.
"""

from importlib import import_module
from typing import Any

from hydra_tune.moved import find_old_paths

__version__ = "0.1.0"

_HOMES = {
    "EventStream": "hydra_tune.pool.job",
    "Failed": "hydra_tune.pool.job",
    "Finished": "hydra_tune.pool.job",
    "HydraExecutor": "hydra_tune.executor",
    "HydraTuneError": "hydra_tune.errors",
    "Job": "hydra_tune.pool.job",
    "Loop": "hydra_tune.train.own_loop.handle",
    "LoopTask": "hydra_tune.loop_task",
    "Reported": "hydra_tune.pool.job",
    "Result": "hydra_tune.pool.job",
    "ShapesOnly": "hydra_tune.shapes_only",
    "SharedModule": "hydra_tune.train.shared_module",
    "TrainTask": "hydra_tune.task",
    "TrialsFailed": "hydra_tune.errors",
    "load_module": "hydra_tune.train.checkpoint.weights",
    "train_plain": "hydra_tune.train.loop.reference_loop",
}

__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604 - the keys are names


find_old_paths()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hydra_tune' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    # Cached as a module attribute: later accesses no longer come here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
