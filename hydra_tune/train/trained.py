"""`TrainingOutcome`: a finished run for the user, from the pool or the plain loop.

The module knows nothing of jobs and devices. Users get the subclass `Result` (`pool/job.py`) at the end of a job, and
`PlainResult` (`train/loop/reference_loop.py`) from `train_plain`. `JobState` (`pool/runtime/job_state.py`),
`pool/fusion/group_completion.py` and `train_plain` call `keep`. `isolation/sending.py` sends results from the pool's process,
some with `WeightsAlone`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.checkpoint.tensors import save_tensors
from hydra_tune.errors import HydraTuneError, first_line
from hydra_tune.paths import absolute_path


@dataclass(frozen=True, slots=True)
class WeightsAlone:
    """Trained weights of a module that is not there itself.

    Attributes:
        tensors: as of the module's `state_dict()`.
        why: why the module is not there.
    """

    tensors: Mapping[str, Tensor]
    why: str

    def state_dict(self) -> dict[str, Tensor]:
        """As of the module, without its extra states."""
        return dict(self.tensors)


@dataclass(slots=True, kw_only=True)
class TrainingOutcome:
    """The outcome of a run.

    Attributes:
        status: "completed", "pruned", "cancelled" or "failed".
        metrics: metrics of the last report; empty if there was none.
        history: one dict per report: `step`, `epoch`, `seconds` since the run began, and the metrics.
        error: the error of a failed run, with its traceback; else None.
    """

    status: str
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    error: BaseException | None = None
    _module: nn.Module | WeightsAlone | None = field(default=None, repr=False)
    _optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)

    def module(self) -> nn.Module:
        """Return the user's own module with the trained weights, in training mode.

        The module of a `LoopTask` is in the mode in which the loop has left the module. The module is on the host, or on
        the device given to `train_plain`. The result is an ordinary module: every parameter and buffer has memory of its
        own, with the strides that the module's class chose, and tied parameters are one object. Only tensors created by
        your own code to share memory still share memory.

        Raises:
            HydraTuneError: the run has left no weights, where the error of a failed run is the cause; or with `isolate=True`
                the module could not be sent from the pool's process.
        """
        module = self._kept()
        if isinstance(module, WeightsAlone):
            raise HydraTuneError(f"{module.why}; state_dict() has its weights, and save() writes them")
        return module

    def _kept(self) -> nn.Module | WeightsAlone:
        if self._module is None:
            reason = "" if self.error is None else f": {first_line(self.error)}"
            raise HydraTuneError(
                f"a {self.status} job keeps no weights, only a completed job does{reason}"
            ) from self.error
        return self._module

    def keep(self, module: nn.Module | WeightsAlone | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Store the objects for `module()` and the other methods; called after training."""
        self._module, self._optimizer = module, optimizer

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's `state_dict()`: the model's own names, tied names included.

        Raises:
            HydraTuneError: the run has left no weights.
        """
        return self._kept().state_dict()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict()`, as defined by `torch.optim`."""
        # Raises where the run has left no weights.
        self._kept()
        assert self._optimizer is not None
        return self._optimizer.state_dict()

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the weights to a safetensors file, which `hydra_tune.load_module(task, path)` reads.

        Args:
            path: path of the file; an existing file is replaced, whole or not at all.
            metadata: texts to store with the weights.

        Raises:
            HydraTuneError: the run has left no weights.
            FileError: the file cannot be written.
        """
        save_tensors(absolute_path(path), self.state_dict(), metadata)
