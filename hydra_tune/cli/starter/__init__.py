"""The first sweep of a new user: `space.yaml` and `train.py`, which `hydra-tune init` copies.

`cli/commands/init.py` calls `write_starter`. Both files must run as they are, on a CPU, in under a minute, and need
nothing beside torch and Optuna. The module must not import torch.
"""

import re
from pathlib import Path

import yaml

from hydra_tune.errors import ConfigError

_NAMES = ("space.yaml", "train.py")


def write_starter(folder: Path) -> list[Path]:
    """Write the sweep file and the task module, and replace nothing.

    The study has the folder's name, so that sweeps of two folders that are started from a third share no study; where the
    folder's name is no plain word, or YAML reads no text in the word, the study has the name `first`. A missing folder is
    made.

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
    study = folder.resolve().name
    # YAML takes names such as `on` and `7` for other values than texts.
    if not re.fullmatch(r"[A-Za-z][\w-]*", study) or yaml.safe_load(study) != study:
        study = "first"
    paths = []
    for name in _NAMES:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text.replace(f"{'name: first':31}", f"{f'name: {study}':31}", 1))
        paths.append(folder / name)
    return paths
