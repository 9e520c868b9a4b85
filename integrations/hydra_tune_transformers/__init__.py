"""A Hugging Face `Trainer` in a shared pool: `task_from_trainer(make_trainer)` describes its training as a `TrainTask`.

The pool reproduces the numbers of `Trainer.train()` on a CPU to the last bit, also for a model cut into shards. The package
refuses a `Trainer` that the pool would not train exactly, with every reason and remedy. `hyperparameter_search` is
`Trainer.hyperparameter_search` with a pool, and `install()` gives the method itself an `executor=`.

The package must not know shards or devices. Read `task` first, which maps each part of a `Trainer` to an argument of the
task, then `refusals`.
"""

from typing import TYPE_CHECKING

from hydra_tune_transformers.errors import RefusedTrainerError
from hydra_tune_transformers.task import task_from_trainer, trainer_from_result

if TYPE_CHECKING:
    from hydra_tune_transformers.search import PoolBackend, hyperparameter_search, install, uninstall
else:

    def __getattr__(name: str) -> object:
        # On first use, because only the search needs Optuna.
        if name in __all__:
            from hydra_tune_transformers import search  # noqa: PLC0415

            return getattr(search, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PoolBackend",
    "RefusedTrainerError",
    "hyperparameter_search",
    "install",
    "task_from_trainer",
    "trainer_from_result",
    "uninstall",
]
