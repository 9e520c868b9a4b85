"""The weights of a search's best trials: a file for each trial in a folder, written by a separate thread.

`StudyWeights` (`integrations/hydra_tune_optuna/weights.py`) decides which trials are best, and offers weights as trials
complete in a search with `keep_best`; `kept_weights` there finds the files later. The module knows no tuner, and must not
know models or the pool: a trial is a number with values.

Note: threads. Any thread may call `offer`, and the thread `hydra-weights` writes. `offer` reads the folder without the lock,
and calls `choose` and `tensors` under the lock; the writing thread calls `choose` without the lock.

Note: no index. A file `trial-7.safetensors` holds the weights of trial 7, with the trial's values in its metadata. So
no kill can separate a file from its description, and several processes may share a folder: after writing a file, each
process determines which of all files are among the best, and removes the others. A file is only ever removed in favour
of files that exist, never in favour of a file still to be written.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hydra_tune.checkpoint.files import make_private_folder, remove_file, remove_leftovers
from hydra_tune.checkpoint.tensors import load_metadata, save_tensors
from hydra_tune.errors import FileError, HydraTuneError

Values = tuple[float, ...]
Choice = Callable[[Mapping[int, Values]], frozenset[int]]
"""Returns the numbers of the trials to keep, given the values of all trials."""

_FILE = re.compile(r"trial-([0-9]+)\.safetensors")
_VALUES = "values"
_MOST_WAITING = 4
_POLL_SECONDS = 0.1
_LOGGER = logging.getLogger(__name__)


def weights_file(folder: Path, number: int) -> Path:
    """Return the path at which a trial's weights lie if kept."""
    return folder / f"trial-{number}.safetensors"


def kept_trials(folder: Path) -> dict[int, Values]:
    """Return the trials with weights in a folder, and their values; unreadable files are skipped.

    Raises:
        FileError: the folder cannot be read.
    """
    trials: dict[int, Values] = {}
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FileError(
            f"cannot read the folder {str(folder)!r}: {error}; give another folder", path=str(folder), errno=error.errno
        ) from error
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is not None:
            try:
                values = json.loads(load_metadata(path)[_VALUES])
                trials[int(match[1])] = tuple(float(value) for value in values)
            except (FileError, KeyError, TypeError, ValueError):
                # Damaged, foreign, or removed by another process: such a file competes with no trial and is not ours to
                # remove.
                continue
    return trials


@dataclass(slots=True)
class _QueuedWeights:
    """Weights to write."""

    values: Values
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class BestWeights:
    """Keeps the weights of the best trials of a search.

    Weights stay in memory until the thread has written them or failed to, or until a later offer finds them beaten.

    Args:
        folder: folder for the files; created with the first file, mode 0700.
        choose: selects the trials to keep; must be deterministic.
    """

    def __init__(self, folder: Path, choose: Choice) -> None:
        self.folder = folder
        self._choose = choose
        self._waiting: dict[int, _QueuedWeights] = {}
        self._writing: dict[int, Values] = {}
        self._failures: list[tuple[int, str]] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def offer(
        self, number: int, values: Values, tensors: Callable[[], Mapping[str, Tensor]], metadata: Mapping[str, str]
    ) -> None:
        """Keep the weights of a completed trial if the trial is among the best.

        The call waits for the writing only while more than `_MOST_WAITING` weights wait.

        Args:
            number: number of the trial.
            values: values of the trial.
            tensors: returns the weights, by name; called only if the weights are kept. The tensors must not change
                afterwards.
            metadata: texts for the file; "values" is reserved.

        Raises:
            FileError: the folder cannot be read.
        """
        # Outside the lock, because the disk is slow. A file written meanwhile is missing here; `_write` chooses again.
        stored = kept_trials(self.folder)
        with self._changed:
            rivals = {**stored, **self._writing, **{rival: item.values for rival, item in self._waiting.items()}}
            chosen = self._choose({**rivals, number: values})
            # Weights beaten before they were written: dropping them here frees their memory at once.
            for rival in self._waiting.keys() - chosen:
                del self._waiting[rival]
            if number not in chosen:
                return
            self._waiting[number] = _QueuedWeights(values, tensors(), {**metadata, _VALUES: json.dumps(values)})
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hydra-weights", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while len(self._waiting) > _MOST_WAITING:
                self._changed.wait(_POLL_SECONDS)

    def is_waiting(self, number: int) -> bool:
        """Whether the weights of a trial are still to be written."""
        with self._changed:
            return number in self._waiting or number in self._writing

    def flush(self) -> None:
        """Wait until all weights are written or have failed."""
        with self._changed:
            while self._waiting or self._writing:
                # With a timeout, so that Ctrl-C gets through on every platform.
                self._changed.wait(_POLL_SECONDS)

    def failures(self) -> list[tuple[int, str]]:
        """Return the failures since the last call: a trial's number, and why its weights could not be written."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Write the waiting weights, and end the thread."""
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        # The intra-op threads belong to the training, and writing must not slow them down.
        torch.set_num_threads(1)
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closing:
                        return
                    self._changed.wait()
                number = next(iter(self._waiting))
                item = self._waiting.pop(number)
                self._writing = {number: item.values}
                self._changed.notify_all()
            try:
                self._write(number, item)
            except Exception as error:  # noqa: BLE001 - the search continues and reports any error
                reason = str(error) if isinstance(error, HydraTuneError) else f"{type(error).__name__}: {error}"
                with self._changed:
                    # Stored as text, because an error's traceback would keep the weights alive.
                    self._failures.append((number, reason))
            # Otherwise the local variable would keep the weights alive until the next ones come.
            del item
            with self._changed:
                self._writing = {}
                self._changed.notify_all()

    def _write(self, number: int, item: _QueuedWeights) -> None:
        make_private_folder(self.folder)
        with _failed_removal_logged():
            remove_leftovers(self.folder)
        save_tensors(weights_file(self.folder, number), item.tensors, item.metadata)
        with _failed_removal_logged():
            # Read anew, because other processes may have written or removed files meanwhile.
            stored = kept_trials(self.folder)
            for beaten in stored.keys() - self._choose(stored):
                remove_file(weights_file(self.folder, beaten))


@contextmanager
def _failed_removal_logged() -> Iterator[None]:
    """Log a failed removal, which is no failure of the trial whose weights are written."""
    try:
        yield
    except FileError as error:
        _LOGGER.warning("Old weights could not be removed: %s", error)
