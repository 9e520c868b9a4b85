"""A sweep's own folder beside its trials' checkpoints: locked by one process at a time, with the sweep's notes.

The folder holds `lock` (`lock.py`), `sweep.json` with the folder's identity, and a JSON file for each note. `run_sweep`
(`cli/run/sweep_run.py`) holds the folder of a sweep with a `checkpoint_dir` from before the pool opens until the pool has
been shut down. The Optuna tuner notes the position of the sampler
(`integrations/hydra_tune_optuna/search/resume_sweep.py`) and earlier failures (`integrations/hydra_tune_optuna/sweep.py`).
`SweepRequest` (`cli/sweep_file/request.py`) carries the folder to the tuner. `cli/dry_run/checking.py` asks whether a sweep
is being run (`check_free`), and `cli/inspect/run_scan.py` finds sweeps by `sweep_path`. The module must not know models,
the pool or a tuner, and must not import torch, because `hydra-tune list` finds sweeps without torch.
"""

import json
import os
import platform
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hydra_tune.checkpoint.files import file_error, make_private_folder, remove_leftovers, write_file
from hydra_tune.checkpoint.lock import LOCK, LockedFolder, is_locked, take_lock
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.errors import CheckpointError
from hydra_tune.supervision.marks import here

# No trial's folder ends like this.
_SUFFIX = "~sweep"


def sweep_path(checkpoint_dir: Path, study: str) -> Path:
    """Return the path of a sweep's folder: always inside `checkpoint_dir`, whatever characters the study's name has."""
    return checkpoint_dir / (folder_name(study) + _SUFFIX)


def check_free(checkpoint_dir: Path, study: str) -> None:
    """Refuse a sweep that a process runs; creates nothing.

    Raises:
        CheckpointError: a process has the sweep's folder.
        FileError: the folder's lock cannot be opened.
    """
    path = sweep_path(checkpoint_dir, study)
    try:
        if is_locked(path):
            raise _held(path, study)
    except OSError as error:
        raise file_error("lock", path / LOCK, error) from error


def _held(path: Path, study: str) -> CheckpointError:
    holder = (path / LOCK).read_text(errors="replace") or "unknown"
    return CheckpointError(
        f"the sweep {study!r} in {str(path.parent)!r} is being run by another process ({holder}); wait until that process has "
        "ended, end it, or give this sweep another study or checkpoint_dir"
    )


class SweepFolder(LockedFolder):
    """The folder of one sweep, in the existing folder of the trials' checkpoints, locked against other processes.

    Attributes:
        identity: identity of the folder, unchanged by moves.

    Raises:
        CheckpointError: another process has the folder, the path is a link, or `sweep.json` is damaged.
        FileError: the folder cannot be created, locked, read or written.
    """

    def __init__(self, checkpoint_dir: Path, study: str) -> None:
        self.path = sweep_path(checkpoint_dir, study)
        if self.path.is_symlink():
            raise CheckpointError(
                f"the sweep's folder {str(self.path)!r} is a link; remove it, or give another checkpoint_dir"
            )
        make_private_folder(self.path)
        self._lock = self._locked(study)
        try:
            remove_leftovers(self.path)
            noted = self.noted("sweep") or {}
            if not isinstance(noted.get("identity"), str):
                noted = {"identity": uuid.uuid4().hex, "study": study}
                self.note("sweep", noted)
            self.identity: str = noted["identity"]
        except BaseException:
            self.close()
            raise

    def note(self, name: str, content: dict[str, Any]) -> None:
        """Store JSON values as a note, whole or not at all, in place of an earlier note of the same name.

        Raises:
            FileError: the note cannot be written.
        """
        write_file(self.path / f"{name}.json", json.dumps(content, allow_nan=False).encode())

    def noted(self, name: str) -> dict[str, Any] | None:
        """Return the last note of a name; None if there is none.

        Raises:
            CheckpointError: the file is damaged.
            FileError: the file cannot be read.
        """
        path = self.path / f"{name}.json"
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                content = json.loads(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error("read", path, error) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{str(path)!r} is damaged: {error}; remove it to continue without it") from error
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{str(path)!r} is damaged: it holds no JSON object; remove it to continue without it"
            )
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _locked(self, study: str) -> int:
        try:
            lock = take_lock(self.path)
            if lock is not None:
                # For users who meet the lock and want to end its holder: under a supervisor, the process to end is the
                # parent.
                runs = os.getpid() if here() is None else os.getppid()
                try:
                    os.ftruncate(lock, 0)
                    os.write(lock, f"{runs} on {platform.node()}".encode())
                except OSError:  # a full disk
                    os.close(lock)
                    raise
                return lock
            raise _held(self.path, study)
        except OSError as error:
            raise file_error("lock", self.path / LOCK, error) from error
