"""The random streams of the calling thread: torch's, numpy's and Python's, as one value.

The integrations of Lightning and of the Trainer compare positions, to refuse a method for a loader that draws
(`integrations/hydra_tune_lightning/data.py`, `integrations/hydra_tune_transformers/task.py`). That of Lightning also restores
positions for each trial's module (`integrations/hydra_tune_lightning/task.py`), and around a second update of a metric
(`integrations/hydra_tune_lightning/epoch_values.py`). The streams of GPUs stay out.
"""

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


# Without `==`, which fails for tensors and arrays of several numbers; `is_same` compares.
@dataclass(frozen=True, eq=False)
class StreamState:
    """The position of each stream."""

    of_torch: Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> Self:
        """Return the present position."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002 - the global stream

    def restore(self) -> None:
        """Go to the position."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)  # noqa: NPY002 - as above
        random.setstate(self.of_python)

    def is_same(self, other: "StreamState") -> bool:
        """Whether nothing was drawn between two positions."""
        return (
            torch.equal(self.of_torch, other.of_torch)
            and all(map(np.array_equal, self.of_numpy, other.of_numpy))
            and self.of_python == other.of_python
        )
