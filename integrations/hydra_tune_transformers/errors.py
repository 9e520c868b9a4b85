"""Errors that only the integration with the transformers library raises.

`task_from_trainer` (`task.py`, with `data.py`) and `hyperparameter_search` (`search.py`) raise `RefusedTrainerError`; people
import the class from `hydra_tune_transformers`.
"""

from collections.abc import Sequence

from hydra_tune.errors import TaskError


class RefusedTrainerError(TaskError):
    """A `Trainer` with settings or code that the pool would not train as `Trainer.train()` does.

    Args:
        reasons: each setting or piece of code, with the reason and the remedy.

    Attributes:
        reasons: as given.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("the pool cannot train this Trainer exactly: " + "; ".join(self.reasons))

    # Pickling calls the class with the message by default.
    def __reduce__(self) -> tuple[type["RefusedTrainerError"], tuple[tuple[str, ...]]]:
        return type(self), (self.reasons,)
