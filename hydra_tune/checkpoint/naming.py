"""Folder names for freely chosen names.

`PoolCheckpointWriter` (`pool/checkpointing/writer.py`) names the folder of each submitted trial, `HydraExecutor`
(`executor.py`) finds that folder again by the name of the trial, `sweep_folder.py` names the folder of a sweep, and
`integrations/hydra_tune_optuna/search/resume_study.py` names the file that notes a study. Another release has to find the
folders of this release, so the names must not change. The module must not import torch, because `hydra-tune list` finds
folders without torch.
"""

import hashlib
import re

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80


def folder_name(name: str) -> str:
    """Return a folder name of letters, digits, points, dashes and underscores; an unsuitable name gets a hash at its end."""
    plain = _UNSAFE.sub("-", name)[:_LONGEST_NAME].strip(".-")
    if plain == name:
        return name
    return f"{plain or 'trial'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
