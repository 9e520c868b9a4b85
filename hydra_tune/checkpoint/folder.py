"""A trial's folder of checkpoints: the last one or two generations, each complete or absent, and verified when read.

`TrialCheckpointer` (`pool/checkpointing/writer.py`) opens the folder when a trial is prepared, writes at each save, and
keeps one generation of a completed or pruned trial. `HydraExecutor` (`executor.py`) and the pools of Ray
(`integrations/hydra_tune_ray/node/pool_runtime.py`) write a copy of a job's state. `pool/checkpointing/lookup.py` removes
folders, and `isolation/child.py` and `isolation/parent.py` ask for `generations`. A pool that resumes or retries a trial
(`pool/checkpointing/writer.py`, `pool/faults/retry.py`), `HydraExecutor` (`executor.py`), `find_checkpoint`
(`pool/checkpointing/lookup.py`) and `train/checkpoint/weights.py` call `load_checkpoint`.

Note: generations. A generation is three files: `00000007.safetensors`, `00000007.json`, and `00000007.manifest`. The
manifest has the sizes of the other two files, and SHA-256 sums of the JSON text and of the tensors, and is written last.
Without a manifest a generation does not exist; the next opener of the folder removes the other files of a killed process.
`write` removes an old generation only once the new generation is complete. The module must not know models, the pool or a
tuner, and must pickle nothing.

Note: locks. The lock of the folder (`lock.py`) keeps other openers out, not other threads of the holder:
`TrialCheckpointer` calls `write` and `keep` on the pool's writer thread alone. `generations` and `load_checkpoint` take no
lock.
"""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_tune.checkpoint.files import file_error, make_private_folder, remove_file, remove_leftovers, write_file
from hydra_tune.checkpoint.lock import LOCK, LockedFolder, take_lock
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.checkpoint.tensors import load_tensors, save_tensors
from hydra_tune.errors import CheckpointError, FileError

_FORMAT = "hydra-tune checkpoint"
_VERSION = 1
_FILE = re.compile(r"([0-9]{8})\.(safetensors|json|manifest)")
_KEPT = 2
_LOGGER = logging.getLogger(__name__)


class CheckpointFolder(LockedFolder):
    """The folder of one trial, created if missing; a lock keeps other openers out while the folder is open.

    Raises:
        CheckpointError: another process, or another trial of this process, has the folder open; or the path is a link,
            or others may write to the folder.
        FileError: the folder cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_symlink():
            raise CheckpointError(f"the folder of checkpoints {str(path)!r} is a link; give the folder it leads to")
        make_private_folder(path)
        self._lock = _locked(path)
        try:
            check_private(path)
            remove_leftovers(path)
            self._remove_unfinished()
        except BaseException:
            self.close()
            raise

    def write(self, saved: CheckpointContent) -> Path:
        """Add a generation, and then remove all but the last two; a failed removal is logged.

        Args:
            saved: checkpoint to write; its tensors must not change meanwhile.

        Returns:
            The path of the manifest.

        Raises:
            FileError: the generation cannot be written, and the earlier generations are unchanged.
        """
        numbers = generations(self.path)
        name = f"{max(numbers, default=0) + 1:08d}"
        tensors, facts, manifest = (self.path / f"{name}.{kind}" for kind in ("safetensors", "json", "manifest"))
        try:
            save_tensors(tensors, saved.tensors)
            text = json.dumps({"facts": saved.facts, "labels": saved.labels}, allow_nan=False).encode()
            write_file(facts, text)
            noted = {
                "format": _FORMAT,
                "version": _VERSION,
                "facts": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
                "tensors": {"bytes": tensors.stat().st_size, "sha256": checksum(saved.tensors)},
            }
            # The manifest makes the generation valid, so it comes last.
            write_file(manifest, json.dumps(noted).encode())
        except BaseException:
            # The first error is the one to report.
            with contextlib.suppress(FileError):
                self._remove(int(name))
            raise
        try:
            self.keep(_KEPT)
        except FileError as error:
            # The new generation is complete.
            _LOGGER.warning("Old checkpoints could not be removed: %s", error)
        return manifest

    def keep(self, count: int) -> None:
        """Remove all but the newest `count` generations.

        Raises:
            FileError: the system refuses a removal; the other generations are removed all the same.
        """
        first_error = None
        for number in generations(self.path)[count:]:
            try:
                self._remove(number)
            except FileError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def go_back_to(self, manifest: Path) -> None:
        """Remove all generations after the generation of this manifest, from which the trial resumes.

        Raises:
            FileError: the system refuses.
        """
        for number in generations(self.path):
            if number > int(manifest.stem):
                self._remove(number)

    def remove(self) -> None:
        """Remove all generations and, if nothing else is inside, the folder; then close the folder.

        Raises:
            FileError: the system refuses.
        """
        try:
            self.keep(0)
            # While the lock is still held, so no other process can take the folder in between.
            remove_file(self.path / LOCK)
            # The folder may hold files of others.
            with contextlib.suppress(OSError):
                self.path.rmdir()
        finally:
            self.close()

    def _remove(self, number: int) -> None:
        # The manifest first: a kill in between leaves no generation that looks complete.
        for kind in ("manifest", "safetensors", "json"):
            remove_file(self.path / f"{number:08d}.{kind}")

    def _remove_unfinished(self) -> None:
        whole = set(generations(self.path))
        for path in list(self.path.iterdir()):
            match = _FILE.fullmatch(path.name)
            if match is not None and int(match[1]) not in whole:
                remove_file(path)


def generations(folder: Path) -> list[int]:
    """Return the numbers of the generations in a folder, the newest first; none if the folder is missing.

    Raises:
        FileError: the folder cannot be read.
    """
    try:
        matches = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise file_error("read", folder, error) from error
    return sorted((int(match[1]) for match in matches if match is not None and match[2] == "manifest"), reverse=True)


def load_checkpoint(path: Path) -> CheckpointContent:
    """Read the last good checkpoint of a trial's folder, or exactly the generation of a manifest.

    If the last generation of a folder cannot be used, the generation before is read, with a warning.

    Raises:
        CheckpointError: there is no checkpoint, or none that can be used.
        FileError: the folder, or the files of the given manifest, cannot be read.
    """
    if not path.is_dir():
        match = _FILE.fullmatch(path.name)
        if match is None or match[2] != "manifest" or not path.exists():
            raise CheckpointError(
                f"there is no checkpoint at {str(path)!r}; give the folder of a trial in checkpoint_dir"
            )
        return _load(path.parent, int(match[1]))
    refused: list[str] = []
    for number in generations(path):
        try:
            content = _load(path, number)
        except (CheckpointError, FileError) as error:
            refused.append(str(error))
            continue
        if refused:
            _LOGGER.warning(
                "A checkpoint is damaged; going on from the one before it, %s: %s", content.path, refused[-1]
            )
        return content
    if not refused:
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}; give the folder of a trial in checkpoint_dir")
    raise CheckpointError(f"no checkpoint in {str(path)!r} can be used: {'; '.join(refused)}")


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: names, dtypes, shapes and all bytes."""
    digest = hashlib.sha256()
    # Sorted, so that the checksum does not depend on the order of a dict.
    for name in sorted(tensors):
        tensor = tensors[name].detach().resolve_conj().resolve_neg()
        kind = f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode()
        digest.update(struct.pack("<Q", len(kind)) + kind)
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            # Without numpy, which may not be installed.
            digest.update((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))
    return digest.hexdigest()


def _load(folder: Path, number: int) -> CheckpointContent:
    manifest = folder / f"{number:08d}.manifest"
    noted = _parsed(manifest, _read(manifest))
    if not isinstance(noted, dict) or noted.get("format") != _FORMAT:
        raise CheckpointError(f"{str(manifest)!r} is not a checkpoint of hydra-tune, despite its name")
    if noted.get("version") != _VERSION:
        raise CheckpointError(
            f"{str(manifest)!r} has version {noted.get('version')!r}, but this release reads version {_VERSION}; use the "
            "release that wrote the checkpoint"
        )
    facts_path, tensors_path = manifest.with_suffix(".json"), manifest.with_suffix(".safetensors")
    text = _read(facts_path)
    _check(facts_path, noted.get("facts"), len(text), lambda: hashlib.sha256(text).hexdigest())
    tensors, _ = load_tensors(tensors_path)
    _check(tensors_path, noted.get("tensors"), tensors_path.stat().st_size, lambda: checksum(tensors))
    content = _parsed(facts_path, text)
    return CheckpointContent(facts=content["facts"], labels=content["labels"], tensors=tensors, path=manifest)


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read()
    except OSError as error:
        raise file_error("read", path, error) from error


def _parsed(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged, or was never a checkpoint: {error}") from error


def _check(path: Path, noted: Any, size: int, digest: Any) -> None:
    if not isinstance(noted, dict) or noted.get("bytes") != size:
        expected = noted.get("bytes") if isinstance(noted, dict) else None
        raise CheckpointError(f"{str(path)!r} is damaged: {expected} bytes were written, and there are {size}")
    actual = digest()
    if actual != noted.get("sha256"):
        raise CheckpointError(f"{str(path)!r} is damaged: its SHA-256 was {noted.get('sha256')}, and is {actual}")


def _locked(path: Path) -> int:
    try:
        try:
            lock = take_lock(path)
        except FileNotFoundError:  # its last holder has removed the folder since
            make_private_folder(path)
            lock = take_lock(path)
    except OSError as error:
        raise file_error("write", path / LOCK, error) from error
    if lock is None:
        raise CheckpointError(
            f"the checkpoints in {str(path)!r} are in use by a trial that is running, here or in another process; wait until "
            "it is over, or submit under another name"
        )
    return lock


def check_private(path: Path) -> None:
    """Refuse a folder that others may write to: others could replace the state from which a trial resumes.

    Raises:
        CheckpointError: the folder is writable by group or others.
    """
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(
            f"the folder of checkpoints {str(path)!r} can be written by others (mode {stat.S_IMODE(mode):04o}); make "
            f"it private: chmod 700 {path}"
        )
