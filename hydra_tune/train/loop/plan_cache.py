"""The plans of one trial: at least one for each kind of batch, made when the first batch of the kind arrives.

`Trial` (`train/trial.py`) makes a `TrialPlanCache`, and `SingleTrial` (`train/single_trial.py`) looks up the plan of each
batch or piece before the batch runs as shard units. `OwnCodeTrial` (`train/own_code_trial.py`) looks up a plan where the
user's own code no longer fits the device. `arrange` (`train/parallel/step_strategy.py`) keeps the ways of a plan in its
`CachedPlan`. A kind has further plans where other Python values, or answers of the batch's own values, need another graph. The
plans themselves come from `PlanLibrary` (`shard/partition/plan_cache.py`), which trials share. All calls come from the trial,
none of them from inside a shard unit, so a `TrialPlanCache` takes no lock.

Note: limits. Each kind of batch needs a capture, and data with ever-new shapes would be captured for ever. So after
some captures further kinds run whole where the model fits, and only the most recently used plans are kept.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.memory.trial_context import tenant_at_work
from hydra_tune.shard.analysis.module_mutation import check_state
from hydra_tune.shard.capture.batch import BatchLeaves, NumberedBatch, containers, flatten
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.shard.python_state.number_inputs import NumberInputError
from hydra_tune.shard.python_state.state_guard import PythonStateGuard, check_gradients, check_kept
from hydra_tune.task import Batch, TrainTask
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.host_quota import HostMemoryQuota
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.timing.unit_times import UnitTimes

_LOGGER = logging.getLogger(__name__)

# Captures of a mode (training or evaluation) in a trial; further kinds run whole where the model fits.
_MAX_CAPTURES = 8
_MAX_PLANS = 128
_MANY_CHANGES = 8  # of what a step reads, of which the user is told
_MAX_STATES = 8  # noted values that the Python no longer reads, and may read again


@dataclass(slots=True, kw_only=True)
class CachedPlan:
    """A plan, the times of its units, and the Python state that the plan was made from.

    `draws` is the number of draws by which a batch moves the torch stream; None if unknown. The number is determined
    once. `is_looked_at` tells whether the Python state was looked at after the first use of a plan that runs the user's own
    code. `ways` lists the ways in which batches of the plan may run together; None until first needed.
    """

    prepared: PreparedPlan
    times: UnitTimes
    python_state: PythonStateGuard | None
    draws: int | None = None
    is_counted: bool = False
    is_looked_at: bool = False
    ways: list[str] | None = None

    @property
    def plan(self) -> ShardPlan:
        """Cut of the step."""
        return self.prepared.plan

    @property
    def holds(self) -> bool:
        """Whether the plan is right for the numbers that the step reads now."""
        if self.prepared.numbers is None:
            return True
        assert self.python_state is not None, "a plan with inputs for numbers has a guard"
        numbers = self.python_state.numbers()
        return numbers is not None and self.prepared.numbers.hold(numbers)

    def with_numbers(self, leaves: BatchLeaves) -> BatchLeaves:
        """Return the leaves of a batch with the inputs that Python computes from the numbers which the step reads now."""
        if self.prepared.numbers is None:
            return leaves
        return replace(leaves, tensors=(*leaves.tensors, *self.numbered(None).inputs))

    def numbered(self, batch: Batch) -> Batch:
        """Return a batch with the inputs that Python computes from the present numbers; the batch itself if there are none."""
        if self.prepared.numbers is None:
            return batch
        assert self.python_state is not None, "a plan with inputs for numbers has a guard"
        numbered = NumberedBatch.of(batch, self.prepared.numbers.places)
        self.prepared.numbers.fill(numbered.inputs, self.python_state.numbers() or ())
        return numbered


class TrialPlanCache:
    """Makes and keeps a trial's plans.

    Args:
        task: task to train; may be replaced before the first plan is made.
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
        # By mode: a pass over the data, and its first batch, if the step changes its batches.
        self._changed_batches: dict[str, tuple[object, Batch]] = {}
        # By mode, the latest last.
        self._python_states: dict[str, list[PythonStateGuard]] = {}
        self._num_changes = 0
        self._has_told_whole = False
        self._has_told_kinds = False
        # Numbers of the step's Python state, in words: inputs of graphs, and those that cannot be inputs; both by mode.
        self._inputs: dict[str, set[str]] = {}
        self._not_inputs: dict[str, set[str]] = {}

    def find(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: ModelState | None,
        batch: Batch,
        leaves: BatchLeaves,
        mode: str,
    ) -> CachedPlan:
        """Return a plan that serves a batch; make a new plan if none does. `state` is None before the first plan.

        Raises:
            HydraTuneError: as `PlanLibrary.prepare`.
        """
        key = (mode, leaves.signature)
        plans = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        serving_plan = self._serving([cached_plan for cached_plan in plans if cached_plan.plan.eager], leaves)
        if serving_plan is not None:
            # The user's own code reads what it likes. Looked at after its first step: the step may have kept another name
            # for a parameter's memory.
            if not serving_plan.is_looked_at:
                serving_plan.is_looked_at = True
                _guard_of(self.task, module, mode)
            return serving_plan
        python_state = self._python_state(module, mode, state)
        of_state = [cached_plan for cached_plan in plans if cached_plan.python_state is python_state]
        serving_plan = self._serving([cached_plan for cached_plan in of_state if cached_plan.holds], leaves)
        if serving_plan is None and python_state is not None and not all(plan.holds for plan in of_state):
            self._count_change(", ".join(python_state.inputs))
        try:
            if serving_plan is not None:
                self._confirm(serving_plan, module, state, batch)
                return serving_plan
            serving_plan = self._make(module, optimizer, state, batch, mode, python_state)
        except NumberInputError as error:
            CHOICES.info("%s", error)
            self._refuse_inputs(mode, python_state, error.places)
            return self.find(module, optimizer, state, batch, leaves, mode)
        plans.append(serving_plan)
        self._tell_kinds(serving_plan.plan)
        del plans[:-_MAX_PLANS]
        while len(self._kept) > _MAX_PLANS:
            self._kept.popitem(last=False)
        return serving_plan

    def _confirm(self, cached_plan: CachedPlan, module: nn.Module, state: ModelState | None, batch: Batch) -> None:
        """Compare a plan with the eager step once more as soon as its numbers differ from those of its capture.

        A number that the tracer has not followed is a constant of the graph, and shows.

        Raises:
            NumberInputError: the plan gives other numbers than the eager step.
        """
        numbers, python_state = cached_plan.prepared.numbers, cached_plan.python_state
        present = None if numbers is None or python_state is None else python_state.numbers()
        if numbers is None or present is None or numbers.serve(present):
            return
        numbered = cached_plan.numbered(batch)
        with nullcontext() if state is None else state.whole(), self._streams.everything():
            self.library.confirm(cached_plan.prepared, self.task, module, numbered)

    def check_again(self, cached_plan: CachedPlan, module: nn.Module, state: ModelState, batch: Batch) -> bool:
        """Compare a plan with the eager step once more, between two steps; return whether there was a comparison.

        Raises:
            CaptureError: the plan gives other numbers than the eager step.
        """
        prepared, python_state = cached_plan.prepared, cached_plan.python_state
        # Of a large model an eager step has no room, a GPU's steps take the host too long, and a compiled step rounds
        # otherwise. After a change that the guard sees, the plan serves no more.
        is_comparable = prepared.is_checked and not self.library.budget.checks_sample and self.task.compile is None
        if not is_comparable or python_state is None or python_state.change() is not None or not cached_plan.holds:
            return False
        if self._serving([cached_plan], flatten(batch)) is None:  # a generator may have filled the batch's memory anew
            return False
        with state.whole(), self._streams.everything():
            self.library.check_again(prepared, self.task, module, cached_plan.numbered(batch))
        return True

    def _refuse_inputs(self, mode: str, python_state: PythonStateGuard | None, places: frozenset[str]) -> None:
        """Let numbers be constants of the graph: each further value needs a capture."""
        assert python_state is not None, "there are inputs only where there is a guard"
        self._not_inputs.setdefault(mode, set()).update(places)
        self._inputs[mode] -= places
        self._forget(python_state)
        self._python_states[mode].remove(python_state)

    def settle(self, cached_plan: CachedPlan, state: ModelState) -> None:
        """Let the plan of the next batch keep the activations worth keeping by its measured times; between two steps only."""
        prepared = cached_plan.prepared
        if prepared.activation_choice is None:
            return
        settled = self._times.settled(prepared, self._batches_per_step)
        if settled is prepared:
            return
        plans = [plan for plan in self.all if plan is not prepared.plan]
        if not self._share.change([*plans, settled.plan]):
            return  # no room on the host for kept activations
        if state.layout.plan is prepared.plan:
            state.layout = replace(state.layout, plan=settled.plan)
        cached_plan.prepared, cached_plan.ways = settled, None
        cached_plan.times = self._times.of(settled, self._batches_per_step)
        count = sum(shard.keeps_activations for shard in settled.plan.shards)
        CHOICES.info("activations of %d of %d shards are kept, by measured times", count, len(settled.plan.shards))

    @property
    def _batches_per_step(self) -> int:
        return self.task.accumulate * self.task.num_pieces

    def check_fresh(self, cached_plan: CachedPlan, batch: Batch, drawn: object) -> None:
        """Refuse data that give a changed batch again: a plan changes no batch, and the step of a plain loop does.

        `drawn` is the pass over the data from which the batch comes; its identity counts.

        Raises:
            TaskError: a batch of an earlier pass is given again.
        """
        if not cached_plan.prepared.effects.changes_batch:
            return
        earlier, first_batch = self._changed_batches.setdefault(cached_plan.plan.mode, (drawn, batch))
        if earlier is not drawn and not containers(first_batch).isdisjoint(containers(batch)):
            raise TaskError(
                f"the step ({cached_plan.plan.mode}) changes its batch (takes an item out, for example), and the data give the "
                "same batch again; a model that is cut changes no batch: let the step copy what it changes, or let the "
                "data make new batches"
            )

    @staticmethod
    def _serving(plans: list[CachedPlan], leaves: BatchLeaves) -> CachedPlan | None:
        # A guard computes on the batch, and whatever computes passes the capture gate.
        asks = any(cached_plan.prepared.guard is not None for cached_plan in plans)
        with GATE.shared() if asks else nullcontext():
            return next((cached_plan for cached_plan in plans if cached_plan.prepared.serves(leaves.tensors)), None)

    def _python_state(self, module: nn.Module, mode: str, state: ModelState | None) -> PythonStateGuard | None:
        """Return the guard of what the step's Python would read now, which code between the steps may have changed.

        A graph bakes these values in (a schedule of a temperature). Values that come back have their guard, and so their
        plans, again.
        """
        guards = self._python_states.setdefault(mode, [])
        latest_change = None
        for guard in reversed(guards):
            if (change := guard.change()) is None:
                return guard
            latest_change = latest_change or change
        inputs = self._inputs.setdefault(mode, set())
        if latest_change is not None:
            if self.task.compile is None:
                inputs |= guards[-1].changed_numbers() - self._not_inputs.setdefault(mode, set())
            self._count_change(latest_change)
            if state is not None:
                check_state(state.tensors, module)
        new_guard = _guard_of(self.task, module, mode, inputs)
        if new_guard is not None:
            guards.append(new_guard)
        for guard in guards[:-_MAX_STATES]:
            self._forget(guard)
        del guards[:-_MAX_STATES]
        return new_guard

    def _count_change(self, name: str) -> None:
        self._num_changes += 1
        if self._num_changes == _MANY_CHANGES:
            _LOGGER.warning(
                "%s has changed, and the step of this trial is captured for the %dth time; no new capture is needed for a "
                "number that the step adds to a tensor or multiplies by one, nor for a buffer of the model (register_buffer)",
                name,
                _MANY_CHANGES + 1,
            )
        else:
            _LOGGER.info("%s has changed, so the step is captured again", name)

    def _tell_whole(self, plan: ShardPlan) -> None:
        """Log why a step runs whole, once for the trial: the reason of its further steps is most often the same."""
        if plan.eager and not self._has_told_whole:
            self._has_told_whole = True
            tenant = tenant_at_work()
            name = "the trial" if tenant is None else tenant.name
            CHOICES.info("the step (%s) of %s runs whole and is not cut: %s", plan.mode, name, plan.why_eager)

    def _tell_kinds(self, plan: ShardPlan) -> None:
        """Warn once of batches of many shapes: each takes a capture, as long as the trial does not fit whole."""
        num_kinds = sum(mode == plan.mode for mode, _ in self._kept)
        if num_kinds > _MAX_CAPTURES and not plan.eager and not self._has_told_kinds:
            self._has_told_kinds = True
            _LOGGER.warning(
                "the step (%s) is captured for the %dth shape of its batches, and a capture takes longer than a step; let the "
                "batches have fewer shapes (pad_to_multiple_of=32 of a Hugging Face collator, or batches of one length), or "
                "raise device_memory so that the model runs whole",
                plan.mode,
                num_kinds,
            )

    def _forget(self, guard: PythonStateGuard) -> None:
        for plans in self._kept.values():
            plans[:] = [cached_plan for cached_plan in plans if cached_plan.python_state is not guard]

    @property
    def all(self) -> list[ShardPlan]:
        """The plans kept."""
        return [cached_plan.plan for plans in self._kept.values() for cached_plan in plans]

    def clear(self) -> None:
        """Forget all plans, and what they were made from."""
        self._kept.clear()
        self._python_states.clear()
        self._changed_batches.clear()

    def _make(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: ModelState | None,
        batch: Batch,
        mode: str,
        python_state: PythonStateGuard | None,
    ) -> CachedPlan:
        task = self.task
        self._captures[mode] += 1
        # A capture copies the model, so all parameters have to be on the host meanwhile.
        with nullcontext() if state is None else state.whole(), self._streams.everything():
            prepared = self.library.prepare(
                task,
                module,
                optimizer,
                batch
                if python_state is None or not python_state.inputs
                else NumberedBatch.of(batch, python_state.inputs),
                mode,
                None if state is None else state.layout,
                prefer_whole=self._captures[mode] > _MAX_CAPTURES,
            )
        if python_state is not None:
            python_state.watch(prepared.files)
        self._tell_whole(prepared.plan)
        if mode == "train":
            prepared = self._times.settled(prepared, self._batches_per_step)
        if any(cached_plan.prepared is prepared for plans in self._kept.values() for cached_plan in plans):
            self._captures[mode] -= 1  # equal values in new objects: nothing was captured
        kept_names = {mode: prepared.effects.kept_names}
        for (kept_mode, _), plans in self._kept.items():
            names = set().union(*(cached_plan.prepared.effects.kept_names for cached_plan in plans))
            kept_names[kept_mode] = kept_names.get(kept_mode, set()) | names
        check_kept(task, module, kept_names)
        if mode == "train":
            check_gradients(task, module, optimizer)
        if state is not None:
            self._share.require([state.layout.plan, *self.all], prepared.plan)
            state.adopt_state(list(prepared.plan.used_state()), self._device)
        times = self._times.of(prepared, self._batches_per_step if mode == "train" else 1)
        # The draws of a stochastic plan are counted when the plan first runs.
        draws = None if prepared.plan.is_stochastic else 0
        return CachedPlan(
            prepared=prepared,
            times=times,
            python_state=python_state,
            draws=draws,
            is_counted=draws == 0,
        )


def _guard_of(task: TrainTask, module: nn.Module, mode: str, inputs: Iterable[str] = ()) -> PythonStateGuard | None:
    """Return the guard of a trial's step; None where the capture will refuse the step for the guard's reason."""
    try:
        return None if is_unbuilt(module) else PythonStateGuard(task, module, mode, inputs=inputs)
    except CaptureError:
        return None
