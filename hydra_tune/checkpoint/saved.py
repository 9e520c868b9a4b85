"""`Saved`: what a checkpoint holds, in memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of a trial between two of its steps.

    Attributes:
        facts: all that is no tensor, as `encode` gives it: what JSON can hold.
        tensors: the tensors that the facts name, on the host.
        labels: what whoever has submitted the trial wants to find with it.
        path: the file that names it; None: it was never written.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Any]
    path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
