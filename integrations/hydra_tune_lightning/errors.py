"""Errors that only the integration with Lightning raises.

`task_from_lightning` (`task.py`, with `callbacks.py`, `options.py`, `data.py` and `optimizer.py`) raises
`RefusedModuleError`, and so may the task's factories in a trial; people import the class from `hydra_tune_lightning`.
"""

from collections.abc import Sequence

from hydra_tune.errors import TaskError


class RefusedModuleError(TaskError):
    """A `LightningModule`, its data, or an option of its `Trainer`, that the pool would not train as `Trainer.fit()` does.

    Args:
        reasons: each hook, option or part, with the reason and the remedy.

    Attributes:
        reasons: as given.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("the pool cannot train this LightningModule exactly: " + "; ".join(self.reasons))

    # Pickling calls the class with the message by default.
    def __reduce__(self) -> tuple[type["RefusedModuleError"], tuple[tuple[str, ...]]]:
        return type(self), (self.reasons,)
