"""Gradients between backward and update: loss scaling, unscaling, and clipping by their global norm.

For a model in shards, all three happen shard by shard, with the numbers of `torch.amp.GradScaler` and
`torch.nn.utils.clip_grad_norm_`. Unscaling and clipping need all gradients before the first update, so a step with either has
its updates in a separate phase. `TrainingBatch` (`training_batch.py`) calls `GradientProcessor.complete` after the last
backward of a shard, and `ModelState` (`train/state/model_state.py`) calls `clip` before each update. `WholeModelRunner`
(`direct.py`), for the user's own step, calls torch's own clipping (`clip_plainly`), or both with loss scaling. `GroupGradients`
(`fusion/group/group_step.py`) are the rules of a fused group, and `train/timing/fake_trial.py` has rules for forecasts. `Trial`
(`train/trial.py`) makes and saves a trial's rules, and `OptimizerStep` (`optimizer_step.py`) ends each step (`next_step`). The
module must not know where blocks are, and takes no lock: units complete the gradients of a step one after the other.

Note: the norm. `clip_grad_norm_` takes the norm of the stack of all tensors' norms. Here each tensor's norm is taken
where the gradient is created, and kept as a number; torch's own function over one-element tensors of the numbers then
gives the same total to the last bit, because the norm of a single number is the number itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.step_module import Objective, objective
from hydra_tune.task import TrainTask

# The defaults of `torch.amp.GradScaler`.
_GROWTH_FACTOR, _BACKOFF_FACTOR, _GROWTH_INTERVAL = 2.0, 0.5, 2000
_FIRST_SCALE = 2.0**16


class GradientProcessor:
    """One trial's rules for gradients, and the state of the present step's gradients.

    Attributes:
        divisor: divisor of the losses of the present step's batches.
        clips_by_groups: whether the norm is taken in the order of the optimizer's groups, in place of the module's.
        scale: the present loss scale, on the host; None if the loss is not scaled.
        skips_update: whether a gradient of the step was not finite under loss scaling, so that the whole step is skipped.
    """

    def __init__(self, task: TrainTask) -> None:
        self.divisor = task.loss_divisor
        self._max_norm = task.max_grad_norm
        self.clips_by_groups = task.clip_order == "groups"
        self.scale = torch.full((), _FIRST_SCALE) if task.precision == "float16" else None
        self._growth = torch.zeros((), dtype=torch.int32)
        self._norms: dict[str, tuple[float, torch.dtype]] = {}
        self.skips_update = False

    @property
    def has_two_phases(self) -> bool:
        """Whether no parameter may be updated before all gradients exist."""
        return self._max_norm is not None or self.scale is not None

    @property
    def is_plain(self) -> bool:
        """Whether no loss scaling applies, so that torch's own clipping is the only work between backward and update."""
        return self.scale is None

    def clip_plainly(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip all gradients of an optimizer's parameters at once, in the task's order, if the task clips gradients."""
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.in_order(module.parameters(), optimizer), self._max_norm)

    def in_order(self, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the optimizer's parameters among those of a module, in the order in which the task clips gradients."""
        own, others = list(parameters), [p for group in optimizer.param_groups for p in group["params"]]
        first, second = (others, own) if self.clips_by_groups else (own, others)
        return [*filter(set(second).__contains__, first)]

    def objective(self, share: float) -> Objective:
        """Return the function from the loss of a share of a batch to the root of its backward."""
        return objective(self.divisor, self.scale, share)

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Unscale complete gradients in place, and note their norms, once all batches of the step are summed.

        Raises:
            TaskError: a gradient is in float16, which unscaling would lose.
        """
        if self.scale is not None:
            self._unscale(gradients, self.scale)
        if self._max_norm is not None:
            self._take_norms(gradients)

    def clip(self, parameters: Sequence[Tensor], order: Sequence[str]) -> None:
        """Scale the `.grad` of some parameters by the norm of all gradients of the step.

        Args:
            parameters: parameters with gradients, on one device.
            order: in the task's order, names of the optimizer's parameters, at least of all with gradients.
        """
        if self._max_norm is None:
            return
        device = parameters[0].device
        # In order, as in `clip_grad_norm_(module.parameters(), ...)`: the norm of the norms is a floating-point sum, whose
        # last bits depend on the order.
        norms = [self._norms[name] for name in order if name in self._norms]
        total = get_total_norm([torch.tensor([norm], dtype=dtype, device=device) for norm, dtype in norms])
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)

    def next_step(self) -> None:
        """End the step: adapt the loss scale and forget the step's gradients."""
        self.adapt_scale(overflowed=self.skips_update)
        self._norms.clear()
        self.skips_update = False

    def adapt_scale(self, *, overflowed: bool) -> None:
        """Adapt the loss scale, if any, after a step; `overflowed` tells whether a gradient was not finite."""
        if self.scale is not None:
            found_inf = torch.full((), float(overflowed))
            torch._amp_update_scale_(
                self.scale, self._growth, found_inf, _GROWTH_FACTOR, _BACKOFF_FACTOR, _GROWTH_INTERVAL
            )

    def state(self) -> dict[str, Any]:
        """Return the loss scale between two steps, for `restore`."""
        return {"scale": self.scale, "growth": self._growth}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved loss scale, if the task scales the loss."""
        if self.scale is not None and state["scale"] is not None:
            self.scale.copy_(state["scale"])
            self._growth.copy_(state["growth"])

    def _take_norms(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        # A single transfer from the device for all norms; float64 holds every norm exactly.
        norms = torch.stack([get_total_norm([gradient]).double() for gradient in gradients.values()]).tolist()
        for (name, gradient), norm in zip(gradients.items(), norms, strict=True):
            self._norms[name] = norm, gradient.dtype

    def _unscale(self, gradients: Mapping[str, Tensor], scale: Tensor) -> None:
        check_unscalable(gradients)
        inverse = inverse_of(scale)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients.values():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same_dtype in by_dtype.values():
            found_inf = torch.zeros((), device=same_dtype[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inverse.to(found_inf.device))
            self.skips_update = self.skips_update or bool(found_inf.item())


def inverse_of(scale: Tensor) -> Tensor:
    """Return the inverse of loss scales: in double precision and then rounded, exactly as in `torch.amp.GradScaler`."""
    return scale.double().reciprocal().float()


def check_unscalable(gradients: Mapping[str, Tensor]) -> None:
    """Raise `TaskError` for a gradient in float16, which unscaling would lose."""
    for name, gradient in gradients.items():
        if gradient.dtype == torch.float16:
            raise TaskError(
                f"the gradient of {name!r} is in float16, where precision='float16' cannot unscale it; leave the "
                "model's parameters in float32, autocast casts what should be cast"
            )
