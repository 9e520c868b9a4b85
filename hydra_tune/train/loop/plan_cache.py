"""The plans of one trial: a plan for each kind of batch, made when the first batch of the kind arrives.

`SingleTrial` (`train/single_trial.py`) looks up the plan of each batch or piece before the batch runs as shard units.

Note: limits. Each kind of batch needs a capture, and data with ever-new shapes would be captured for ever. So after
some captures further kinds run whole where the model fits, and only the most recently used plans are kept.
"""

from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.devices.device import Device
from hydra_tune.shard.capture.batch import BatchLeaves, same_bits
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.shard.verify.plan_check import plain_attributes, tensor_attributes
from hydra_tune.task import Batch, TrainTask
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.host_quota import HostMemoryQuota
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.timing.unit_times import UnitTimes

# Kinds of batches that are captured in a trial; further kinds run whole where the model fits.
_MAX_CAPTURES = 8
_MAX_PLANS = 128


@dataclass(slots=True, kw_only=True)
class CachedPlan:
    """A plan, the times of its units, and the model's attributes when the plan was made.

    `constants` has the plan's constant for each tensor among the attributes whose values the plan may have taken.
    `draws` is the number of draws by which a batch moves the torch stream; None if unknown. The number is determined
    once. `ways` lists the ways in which batches of the plan may run together; None until first needed.
    """

    prepared: PreparedPlan
    times: UnitTimes
    attributes: dict[str, Any]
    constants: dict[str, Tensor]
    draws: int | None = None
    is_counted: bool = False
    ways: list[str] | None = None

    @property
    def plan(self) -> ShardPlan:
        """Cut of the step."""
        return self.prepared.plan

    def is_of(self, attributes: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Whether the plan serves a model with these attributes, which code between the steps may have changed."""
        return self.plan.eager or (
            self.attributes == attributes
            and all(name in tensors and same_bits(tensors[name], constant) for name, constant in self.constants.items())
        )


class TrialPlanCache:
    """Makes and keeps a trial's plans.

    Args:
        task: task to train; may be replaced before the first plan is made.
        library: source of plans.
        streams: the trial's random streams; a capture runs the user's code.
        device: any device of the pool, for host memory.
        share: the trial's share of host memory; a further plan may need more.
        times: times of the units of plans, measured together by all trials of a pool.
    """

    def __init__(
        self,
        task: TrainTask,
        library: PlanLibrary,
        streams: RandomStreams,
        device: Device,
        share: HostMemoryQuota,
        times: SharedUnitTimes,
    ) -> None:
        self._share = share
        self._times = times
        self.task = task
        self.library = library
        self._streams = streams
        self._device = device
        # Least recently used first.
        self._kept: OrderedDict[Any, list[CachedPlan]] = OrderedDict()
        self._captures: Counter[str] = Counter()

    def find(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: ModelState | None,
        batch: Batch,
        leaves: BatchLeaves,
        mode: str,
    ) -> CachedPlan:
        """Return a plan that serves a batch; make a new plan if none does.

        Args:
            module: the trial's module.
            optimizer: the trial's optimizer.
            state: tensors of module and optimizer, once the first plan has been made.
            batch: the batch as the user's code returned it.
            leaves: tensors of the batch.
            mode: "train" or "evaluate".

        Raises:
            HydraTuneError: as `PlanLibrary.prepare`.
        """
        key = (mode, leaves.signature)
        plans = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        # A graph bakes in the model's attributes, which code between the steps may change (a schedule of a temperature).
        attributes = plain_attributes(module) if plans else {}
        tensors = tensor_attributes(module) if any(cached_plan.constants for cached_plan in plans) else {}
        plans[:] = [cached_plan for cached_plan in plans if cached_plan.is_of(attributes, tensors)]
        # A guard computes on the batch, and whatever computes passes the capture gate.
        asks = any(cached_plan.prepared.guard is not None for cached_plan in plans)
        with GATE.shared() if asks else nullcontext():
            serving_plan = next(
                (cached_plan for cached_plan in plans if cached_plan.prepared.serves(leaves.tensors)), None
            )
        if serving_plan is None:
            serving_plan = self._make(module, optimizer, state, batch, mode)
            plans.append(serving_plan)
            del plans[:-_MAX_PLANS]
            while len(self._kept) > _MAX_PLANS:
                self._kept.popitem(last=False)
        return serving_plan

    @property
    def all(self) -> list[ShardPlan]:
        """The plans kept."""
        return [cached_plan.plan for plans in self._kept.values() for cached_plan in plans]

    def clear(self) -> None:
        """Forget all plans."""
        self._kept.clear()

    def _make(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: ModelState | None, batch: Batch, mode: str
    ) -> CachedPlan:
        task = self.task
        self._captures[mode] += 1
        # A capture copies the model, so all parameters have to be on the host meanwhile.
        with nullcontext() if state is None else state.whole(), self._streams.everything():
            prepared = self.library.prepare(
                task,
                module,
                optimizer,
                batch,
                mode,
                None if state is None else state.layout,
                prefer_whole=self._captures[mode] > _MAX_CAPTURES,
            )
        if state is not None:
            self._share.require([state.layout.plan, *self.all], prepared.plan)
            state.adopt_state(list(prepared.plan.used_state()), self._device)
        times = self._times.of(prepared, task.accumulate * task.num_pieces if mode == "train" else 1)
        # The draws of a stochastic plan are counted when the plan first runs.
        draws = None if prepared.plan.is_stochastic else 0
        # By value, because the plan may have been captured from the equal model of another trial.
        tensors = {} if is_unbuilt(module) else tensor_attributes(module)
        constants = {
            name: constant
            for constant in prepared.plan.constants.values()
            for name, tensor in tensors.items()
            if same_bits(tensor, constant)
        }
        return CachedPlan(
            prepared=prepared,
            times=times,
            attributes=plain_attributes(module),
            constants=constants,
            draws=draws,
            is_counted=draws == 0,
        )
