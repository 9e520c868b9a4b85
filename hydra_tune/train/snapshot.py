"""`Snapshot`: a trial's state between two steps, still where it lies, and ways to have it stay as it is now."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hydra_tune.checkpoint.saved import Saved
from hydra_tune.memory.block import lay_out
from hydra_tune.train.state import ModelState

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A trial's state, to be saved before anything of the trial runs again.

    Attributes:
        facts: all that is no tensor.
        tensors: by name; those that a unit of the trial changes, wherever they are now.
        state: whose groups hold most of them; None before the first step.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    state: ModelState | None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that a copy takes."""
        return lay_out(list(self.tensors.values()), _ALIGNMENT)[1]

    def copied(self, labels: Mapping[str, Any], buffer: Tensor | None = None) -> Saved:
        """A copy on the host; the trial may go on.

        Args:
            labels: of the checkpoint.
            buffer: where to put it, uint8; None: in memory of its own.
        """
        slots, size = lay_out(list(self.tensors.values()), _ALIGNMENT)
        flat = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]
        copies = {name: slot.view(flat) for name, slot in zip(self.tensors, slots, strict=True)}
        targets = {id(tensor): copies[name] for name, tensor in self.tensors.items()}
        held = set() if self.state is None else set(self.state.aliases())
        if self.state is not None:
            self.state.copy_out(targets)
        for tensor in self.tensors.values():
            if id(tensor) not in held:
                targets[id(tensor)].copy_(tensor.detach())
        # A tensor that has two names is copied once.
        return Saved(facts=self.facts, tensors={n: targets[id(t)] for n, t in self.tensors.items()}, labels=labels)

    def in_place(self, labels: Mapping[str, Any]) -> Saved:
        """The same bytes where they lie: good as long as the trial does not go on."""
        held = {} if self.state is None else self.state.aliases()
        tensors = {name: held.get(id(tensor), tensor.detach()) for name, tensor in self.tensors.items()}
        return Saved(facts=self.facts, tensors=tensors, labels=labels)


class Snapshots(Protocol):
    """A trial between two of its steps, as whoever saves it sees it."""

    def snapshot(self) -> Snapshot:
        """Its state now.

        Raises:
            CheckpointError: it has something that no checkpoint can hold.
        """


class Keeper(Protocol):
    """Who saves a trial."""

    @property
    def every_steps(self) -> int | None:
        """After how many steps each the trial is saved; None where it is not by steps."""

    def reached(self, trial: Snapshots, *, steps: int, at_report: bool, is_last: bool) -> None:
        """The trial is between two steps; it goes on when this returns.

        Args:
            trial: the trial.
            steps: optimizer steps it has done.
            at_report: whether it has just made a report, which nobody has been told yet.
            is_last: whether it does nothing after this.

        Raises:
            CheckpointError: it has something that no checkpoint can hold.
        """
