"""`CheckpointContent`: the content of a checkpoint, in memory.

`train/checkpoint/snapshot.py` makes the content between two steps, `CheckpointFolder` (`folder.py`) writes the content, and
`load_checkpoint` there reads the content. `train/checkpoint/trial_checkpoint.py` decodes the content when a trial resumes,
and `train/checkpoint/weights.py` when a caller loads weights. `TrialCheckpointer` (`pool/checkpointing/writer.py`) passes
copies on to `HydraExecutor` (`executor.py`) and to the pools of Ray
(`integrations/hydra_tune_ray/node/pool_runtime.py`). The module must not know models, the pool or a tuner.
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
        tensors: the tensors named by the facts: on the host, or, in a snapshot `in_place`, where the trial has the tensors.
        labels: values that the trial's submitter stores with the checkpoint.
        path: manifest from which the content was read; None: the content was made in memory.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Any]
    path: Path | None = None
