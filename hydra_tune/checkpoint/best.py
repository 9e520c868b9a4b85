"""The weights of a search's best trials: one file each in a folder, written by a thread of its own.

Who is best, the owner of the folder says. Knows no tuner: a trial is a number with values.

Note: no index. A file `trial-7.safetensors` is the weights of trial 7, and its values are in its metadata. So there is nothing
that a file could be without, whenever the process is killed, and several processes may share a folder: each looks, after it
has written a file, which of all files are among the best, and removes the others. A file is removed for one that is there,
never for one that was to be written.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hydra_tune.checkpoint.files import make_private_folder, remove_file, remove_leftovers
from hydra_tune.checkpoint.tensors import load_metadata, save_tensors
from hydra_tune.errors import FileError, HydraTuneError

Values = tuple[float, ...]
Choice = Callable[[Mapping[int, Values]], frozenset[int]]
"""Which of these trials are kept, by their values."""

_FILE = re.compile(r"trial-([0-9]+)\.safetensors")
_VALUES = "values"
_MOST_WAITING = 4
_POLL_SECONDS = 0.1


def weights_file(folder: Path, number: int) -> Path:
    """Where the weights of a trial are, if they are kept."""
    return folder / f"trial-{number}.safetensors"


def kept_trials(folder: Path) -> dict[int, Values]:
    """The trials whose weights are in a folder, and their values; without what cannot be read.

    Raises:
        FileError: the folder cannot be read.
    """
    found: dict[int, Values] = {}
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FileError(
            f"cannot read the folder {str(folder)!r}: {error}; give another place", path=str(folder), errno=error.errno
        ) from error
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is not None:
            try:
                values = json.loads(load_metadata(path)[_VALUES])
                found[int(match[1])] = tuple(float(value) for value in values)
            except (FileError, KeyError, TypeError, ValueError):
                continue  # damaged, not ours, or removed by another process: nobody's rival, and not ours to remove
    return found


@dataclass(slots=True)
class _Waiting:
    """Weights that are to be written."""

    values: Values
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class BestWeights:
    """Keeps the weights of the best trials of a search.

    Weights are in memory only until they are written or beaten: of those that wait, none is worse than what is kept.

    Args:
        folder: for the files; made with the first of them, mode 0700.
        choose: which trials are kept, of those it is given; told the same again it says the same.
    """

    def __init__(self, folder: Path, choose: Choice) -> None:
        self.folder = folder
        self._choose = choose
        self._waiting: dict[int, _Waiting] = {}
        self._writing: dict[int, Values] = {}
        self._failures: list[tuple[int, str]] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def offer(
        self, number: int, values: Values, tensors: Callable[[], Mapping[str, Tensor]], metadata: Mapping[str, str]
    ) -> None:
        """A trial has completed: keep its weights if it is among the best.

        Returns at once, unless so many are waiting to be written that memory would fill up; then when one has been.

        Args:
            number: of the trial.
            values: of the trial.
            tensors: returns the weights, by name; called only if they are kept. Nobody changes them afterwards.
            metadata: texts for the file; "values" is taken.

        Raises:
            FileError: the folder cannot be read.
        """
        there = kept_trials(self.folder)
        with self._changed:
            rivals = {**there, **self._writing, **{other: one.values for other, one in self._waiting.items()}}
            chosen = self._choose({**rivals, number: values})
            for other in self._waiting.keys() - chosen:
                del self._waiting[other]
            if number not in chosen:
                return
            self._waiting[number] = _Waiting(values, tensors(), {**metadata, _VALUES: json.dumps(values)})
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
        """Wait until everything is written or has failed."""
        with self._changed:
            while self._waiting or self._writing:
                self._changed.wait(_POLL_SECONDS)  # not for ever: Ctrl-C gets through on every platform

    def failures(self) -> list[tuple[int, str]]:
        """What has gone wrong since the last call: the number of a trial, and why its weights are not kept."""
        with self._changed:
            found, self._failures = self._failures, []
        return found

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
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
            except Exception as error:  # noqa: BLE001 - whatever it is, the search goes on, and is told
                told = str(error) if isinstance(error, HydraTuneError) else f"{type(error).__name__}: {error}"
                with self._changed:
                    self._failures.append((number, told))  # a text: an error's traceback would hold the weights
            del item  # or the weights would be held until the next ones come
            with self._changed:
                self._writing = {}
                self._changed.notify_all()

    def _write(self, number: int, item: _Waiting) -> None:
        make_private_folder(self.folder)
        remove_leftovers(self.folder)
        save_tensors(weights_file(self.folder, number), item.tensors, item.metadata)
        there = kept_trials(self.folder)
        for beaten in there.keys() - self._choose(there):
            remove_file(weights_file(self.folder, beaten))
