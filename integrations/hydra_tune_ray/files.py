"""A checkpoint's folder as bytes, to go from one node to another through Ray's object store."""

from pathlib import Path

from hydra_tune_ray.messages import Files

FOLDER = "trial"
"""Where a checkpoint of Ray has that of a trial, in the format of `hydra_tune.checkpoint`."""

_KINDS = (".safetensors", ".json", ".manifest")


def read_files(folder: Path) -> Files:
    """All files of a checkpoint.

    Raises:
        OSError: one of them cannot be read.
    """
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _KINDS}


def write_files(files: Files, folder: Path) -> None:
    """Write them to a folder, which is made if it is not there, for its owner alone; the manifest last.

    Raises:
        OSError: the system refuses.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name.endswith(".manifest")):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(files[name])
