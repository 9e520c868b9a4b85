"""`TrialStateSnapshot`: a trial's state between two steps, in place, and two ways to preserve the present state.

`TrialCheckpointer` (`pool/checkpointing/writer.py`), the `SnapshotSaver` of a trial, asks the trial between two steps for a
snapshot, when a checkpoint or a copy is due; `Trial` (`train/trial.py`) makes the snapshot. The module must not write files.

Note: time. A snapshot refers to live tensors and values. Copy or write the snapshot before any code of the trial runs
again, on the thread that has the trial's turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.memory.block import lay_out
from hydra_tune.shard.python_state.state_guard import TaskStateGuard
from hydra_tune.train.state.model_state import ModelState

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStateSnapshot:
    """A trial's state, to be saved before any code of the trial runs again.

    Attributes:
        facts: all parts of the state other than tensors.
        tensors: tensors by name: the live objects, wherever their bytes are now.
        state: owner of the groups with most of the tensors; None before the first step.
        python_state: what the user's functions keep in Python, of which a checkpoint has digests alone.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    state: ModelState | None
    python_state: TaskStateGuard

    @property
    def nbytes(self) -> int:
        """Host memory for a copy, in bytes."""
        return lay_out(list(self.tensors.values()), _ALIGNMENT)[1]

    def copied(self, labels: Mapping[str, Any], buffer: Tensor | None = None) -> CheckpointContent:
        """Copy the state to the host, into a buffer of uint8 or new memory; the trial may go on afterwards."""
        slots, size = lay_out(list(self.tensors.values()), _ALIGNMENT)
        flat = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]
        copies = {name: slot.view(flat) for name, slot in zip(self.tensors, slots, strict=True)}
        targets = {id(tensor): copies[name] for name, tensor in self.tensors.items()}
        block_ids = set() if self.state is None else set(self.state.aliases())
        # Tensors in blocks may move at any time, so they are copied under the locks of their blocks.
        if self.state is not None:
            self.state.copy_out(targets)
        for tensor in self.tensors.values():
            if id(tensor) not in block_ids:
                targets[id(tensor)].copy_(tensor.detach())
        # By `id`, so a tensor with two names is copied once.
        return CheckpointContent(
            facts=self.facts, tensors={n: targets[id(t)] for n, t in self.tensors.items()}, labels=labels
        )

    def in_place(self, labels: Mapping[str, Any]) -> CheckpointContent:
        """Return the state in place, without a copy; valid only until the trial goes on."""
        aliases = {} if self.state is None else self.state.aliases()
        tensors = {name: aliases.get(id(tensor), tensor.detach()) for name, tensor in self.tensors.items()}
        return CheckpointContent(facts=self.facts, tensors=tensors, labels=labels)


class SnapshotSource(Protocol):
    """A trial between two of its steps, as seen by its keeper."""

    def snapshot(self) -> TrialStateSnapshot:
        """Return the present state.

        Raises:
            CheckpointError: the state has a value that no checkpoint can hold.
        """


class SnapshotSaver(Protocol):
    """Interface of the part that saves a trial."""

    @property
    def path(self) -> Path | None:
        """Folder of the trial's checkpoints; None if states are only copied in memory."""

    @property
    def every_steps(self) -> int | None:
        """Optimizer steps between two checkpoints; None if checkpoints do not depend on steps."""

    def begins(self, python_state: TaskStateGuard) -> None:
        """Note to which state of the user's functions the trial would begin again; nothing has been drawn so far."""

    def reached(self, trial: SnapshotSource, *, steps: int, at_report: bool, is_last: bool) -> None:
        """Save the trial if due; the trial is between two steps and continues when the call returns.

        Args:
            trial: the trial.
            steps: optimizer steps done so far.
            at_report: whether the trial has changed without a step: it has just made a report that has not been delivered
                yet, or its scheduler has written the last weights.
            is_last: whether the trial has nothing left to train.

        Raises:
            CheckpointError: the trial has a value that no checkpoint can hold.
        """
