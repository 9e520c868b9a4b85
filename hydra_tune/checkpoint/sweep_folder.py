"""A sweep's own folder beside its trials' checkpoints: kept by one process at a time, with what the sweep notes of itself.

It holds `lock`, `sweep.json` with the folder's identity, and a file of JSON for each thing that is noted. The lock is the
system's: what a dead process has left is free, and nothing needs tidying up. Knows nothing of what is noted.
"""

import json
import os
import platform
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hydra_tune.checkpoint.files import file_error, make_private_folder, remove_leftovers, write_file
from hydra_tune.checkpoint.lock import LOCK, take_lock
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.errors import CheckpointError
from hydra_tune.supervision.marks import here

_SUFFIX = "~sweep"  # no trial's folder ends so


def sweep_path(checkpoint_dir: Path, study: str) -> Path:
    """Where a sweep's folder is, or will be: in `checkpoint_dir`, whatever the study's name holds."""
    return checkpoint_dir / (folder_name(study) + _SUFFIX)


class SweepFolder:
    """The folder of one sweep, which no other process has meanwhile.

    Args:
        checkpoint_dir: where the trials' checkpoints are; is there.
        study: the study's name.

    Attributes:
        path: of the folder.
        identity: of the folder, the same wherever it is moved.

    Raises:
        CheckpointError: another process has it, or it is a link.
        FileError: it cannot be made or read.
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
        """Keep something, whole or not at all, in place of what had the name before.

        Args:
            name: of letters.
            content: what JSON can hold.

        Raises:
            FileError: it cannot be written.
        """
        write_file(self.path / f"{name}.json", json.dumps(content, allow_nan=False).encode())

    def noted(self, name: str) -> dict[str, Any] | None:
        """What was kept last under a name; None if nothing was.

        Raises:
            CheckpointError: the file is damaged.
            FileError: it cannot be read.
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
            raise CheckpointError(f"{str(path)!r} is damaged: {error}; remove it to go on without") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{str(path)!r} is damaged: it holds no map; remove it to go on without")
        return content

    def close(self) -> None:
        """Let others have the folder. May be called again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _locked(self, study: str) -> int:
        path = self.path / LOCK
        try:
            lock = take_lock(self.path)
            if lock is not None:
                os.ftruncate(lock, 0)
                runs = (
                    os.getpid() if here() is None else os.getppid()
                )  # for whoever meets the lock, and wants to end it
                os.write(lock, f"{runs} on {platform.node()}".encode())
                return lock
            holder = path.read_text(errors="replace") or "unknown"
        except OSError as error:
            raise file_error("lock", path, error) from error
        raise CheckpointError(
            f"the sweep {study!r} in {str(self.path.parent)!r} is being run by another process ({holder}); wait until that is "
            "over, or end it, or give this one another study or checkpoint_dir"
        )
