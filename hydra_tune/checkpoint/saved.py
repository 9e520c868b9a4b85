"""`CheckpointContent`: the content of a checkpoint, in memory.

`train/checkpoint/snapshot.py` makes the content between two steps, `CheckpointFolder` (`folder.py`) writes and reads
the content, and `train/checkpoint/trial_checkpoint.py` decodes the content when a trial resumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The state of a trial between two of its steps.

    Attributes:
        facts: all parts of the state other than tensors, encoded by `encode` as JSON values.
        tensors: the tensors named by the facts, on the host.
        labels: values that the trial's submitter stores with the checkpoint.
        path: manifest from which the content was read; None: the content was made in memory.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Any]
    path: Path | None = None
