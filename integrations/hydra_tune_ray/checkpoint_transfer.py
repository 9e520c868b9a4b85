"""Converts a checkpoint's folder to bytes and back, for transport between nodes through Ray's object store.

`PoolTrainable` (`trainable.py`) reads a checkpoint that Ray restores. `NodePoolRuntime` (`node/pool_runtime.py`) writes the
files out before the trial resumes, and reads the files of a saved trial. `TrialClient` (`client.py`) writes the files that a
pool returns, of a trial on another node or of a completed trial. `weights.py` finds the folder of a checkpoint, and
`sweep.py` the note of a trial that has pruned itself.

Note: the module must not import torch. The manifest is written last, so that half a checkpoint never counts as whole.
"""

from pathlib import Path

from hydra_tune_ray.messages import Files

FOLDER = "trial"
"""Folder of a trial's checkpoint within Ray's checkpoint, in the format of `hydra_tune.checkpoint`."""

NOTE = "pruned.txt"
"""File of Ray's last checkpoint of a trial that has pruned itself, in place of the folder."""

_KINDS = (".safetensors", ".json", ".manifest")


def read_files(folder: Path) -> Files:
    """Read all files of a checkpoint.

    Raises:
        OSError: a file cannot be read.
    """
    # Locks and temporary files of a folder stay where they are.
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _KINDS}


def write_files(files: Files, folder: Path) -> None:
    """Write a checkpoint's files to a folder, readable by the owner alone; the folder is made if missing.

    Raises:
        OSError: the system refuses.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name.endswith(".manifest")):
        path = folder / name
        # Restrict access before the content is there.
        path.touch(mode=0o600)
        path.write_bytes(files[name])
