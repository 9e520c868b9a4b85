"""`PythonChanges`: names the values that a trial's functions keep in Python, and that a resumed trial has lost.

No checkpoint has such values, so a checkpoint has digests of values that have changed since the trial's beginning. `Trial`
(`train/trial.py`) writes the digests with each snapshot, and compares the values of a resumed trial with the digests of the
checkpoint before the first new batch. `LoopTrial` (`train/own_loop/loop_trial.py`) compares before the loop goes on.
`SingleTrial` and `LoopTrial` call `begins`, only where the trial is saved. The module must not restore a value: a difference is
a line of the log.
"""

import itertools
import logging
from collections.abc import Callable, Mapping

from hydra_tune.shard.python_state.state_guard import TaskStateGuard

_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_MOST_SAVED = 64  # changed values in a checkpoint: more names would tell nobody more
_MOST_NAMED = 4  # in a warning


class PythonChanges:
    """Digests of the values of one trial's functions: at its beginning, and those that a checkpoint had."""

    def __init__(self, trial: str) -> None:
        self._trial = trial
        self._began: dict[str, str] | None = None
        self._earlier: dict[str, str] = {}
        self._is_compared = True

    def begins(self, present: TaskStateGuard) -> None:
        """Note the values at the trial's beginning, or where the trial is resumed."""
        self._began = present.digests()

    def resumes(self, saved: Mapping[str, str]) -> None:
        """Note the digests of the checkpoint from which the trial is resumed."""
        self._earlier, self._is_compared = dict(saved), not saved

    def changed(self, present: TaskStateGuard) -> dict[str, str]:
        """Return the digests of values that have changed since the trial's beginning, before the trial was resumed included."""
        began = self._began or {}
        changed = (
            (name, digest)
            for name, digest in present.digests().items()
            if name in self._earlier or began.get(name) != digest
        )
        return dict(itertools.islice(changed, _MOST_SAVED))

    def compare(self, read: Callable[[], TaskStateGuard]) -> None:
        """Log the values that differ from those of the checkpoint, once, before a resumed trial's first new batch."""
        if self._is_compared:
            return
        self._is_compared = True
        digests = read().digests()
        lost = [name for name, digest in self._earlier.items() if digests.get(name, digest) != digest]
        if lost:
            names = ", ".join(lost[:_MOST_NAMED]) + (
                f" and {len(lost) - _MOST_NAMED} more" if lost[_MOST_NAMED:] else ""
            )
            # A line of the log: a warning that a filter turns into an error would fail the trial.
            _LOGGER.warning(
                "%s is resumed, and %s had other values when the trial was saved: no checkpoint has what functions keep in "
                "Python, and if the trial's numbers depend on these values, they are others than without the interruption; "
                "keep such state in a buffer or an attribute of the model (the page 'Stop and resume' of the documentation)",
                self._trial,
                names,
            )
