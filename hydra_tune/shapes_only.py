"""Data known only by shape: enough to plan a task, and never trained on.

People import `ShapesOnly` from `hydra_tune` to plan a task without data; `HydraExecutor.submit` (`executor.py`) and
`train_plain` (`train/loop/reference_loop.py`) refuse such a task before training, and `hydra-tune plan`
(`cli/dry_run/planning.py`) asks `has_shapes_only`. Only a handle, or the dataset of a loader, is recognized: a placeholder
inside another dataset, or made by a callable, is not. The module must not know tuners.
"""

from typing import Any

from torch.utils.data import DataLoader, Dataset

from hydra_tune.errors import ConfigError
from hydra_tune.task import TrainTask


class ShapesOnly(Dataset[Any]):
    """Placeholder for missing data, so that a task can be planned before its data is available.

    `HydraExecutor.plan` and `profile` accept a task with placeholder data, because both depend only on shapes and on
    the number of samples. `submit`, `run`, `train_plain` and `hydra-tune sweep` refuse the task with a `ConfigError`.

    Args:
        sample: one sample in the form of the real data; returned for every index.
        length: number of samples.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, sample: Any, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"ShapesOnly needs a length of at least 1, not {length!r}")
        self._sample, self._length = sample, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        # Plain iteration over a sequence ends only at an IndexError.
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._sample


def has_shapes_only(task: TrainTask) -> bool:
    """Whether some of a task's data is recognized as a placeholder."""
    handles = (task.train, task.validate)
    # Placeholder data may be wrapped in a loader; a callable's data is unknown until a call.
    data = [handle.dataset if isinstance(handle, DataLoader) else handle for handle in handles]
    return any(isinstance(handle_data, ShapesOnly) for handle_data in data)


def refuse_shapes_only(task: TrainTask) -> None:
    """Refuse to train a task with placeholder data.

    Raises:
        ConfigError: the task's data is `ShapesOnly`.
    """
    if has_shapes_only(task):
        raise ConfigError(
            "a task whose data is ShapesOnly can be planned, but not trained: its samples are made up; give it its data "
            "(in a sweep file, usually a parameter that says where the data is)"
        )
