"""The first sweep of a new user: `space.yaml` and `train.py`, which `hydra-tune init` copies as they are.

Both must run as they are, on a CPU, in under a minute, and need nothing beside torch and Optuna.
"""

from pathlib import Path

from hydra_tune.errors import ConfigError

_NAMES = ("space.yaml", "train.py")


def write_starter(folder: Path) -> list[Path]:
    """Write the sweep file and the task module, and replace nothing.

    Args:
        folder: made if missing.

    Returns:
        The files.

    Raises:
        ConfigError: one of the files is there already; nothing was written.
        OSError: the folder or a file cannot be written.
    """
    there = [name for name in _NAMES if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise ConfigError(
            f"{' and '.join(there)} in {str(folder)!r} would be replaced; give another folder, or move them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in _NAMES:
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        paths.append(folder / name)
    return paths
