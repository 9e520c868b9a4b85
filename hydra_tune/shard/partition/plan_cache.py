"""The library of plans: captures, cuts, pilots and verifies a kind of step for the first trial that asks, and keeps the plan.

A library serves a single pool (`pool/runtime/settings.py` makes both), because the devices of the pool decide the budget of
every cut.

A trial (`train/loop/plan_cache.py`) asks for a plan when a new kind of batch comes; so do fused groups
(`fusion/compile/batched_plan_cache.py`) and, with the library of `for_plans`, the trials of a dry run
(`pool/dry_run/report.py`). `train/loop/microbatch_choice.py` asks `foresee` for the cost of each number of pieces of a batch,
and keeps its choices in `piece_counts`. Trials and groups keep the `PreparedPlan`, and also compare plans again, by
`check_again` and `confirm`. The module must not know the course of a trial, the schedule, or the places of blocks.

Note: locks and streams. One lock serves all threads of a pool, and is held during a capture and a check. A thread leaves
the capture gate before the thread waits for the lock. The random streams of the calling thread are as before afterwards.

Note: only plans of graphs are shared. A plan that runs whole is made for its trial, because the plan holds the trial's
module; of a step that cannot be captured the library keeps the reason. A kept plan may be dropped for newer plans. A step
without a key (`key_of` in `plan_request.py`) is captured for each trial.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import BudgetError, CaptureError, ConfigError, HydraTuneError
from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis, analyse
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.gpu_code import preparing_for_gpus
from hydra_tune.shard.capture.guards import BatchValueGuard
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.capture.own_functions import opaque_calls
from hydra_tune.shard.capture.step_capture import (
    CapturedStepGraph,
    StateSpec,
    describe,
    state_specs,
)
from hydra_tune.shard.capture.value_replay import Answer
from hydra_tune.shard.cost.activation_policy import (
    ActivationBudget,
    MeasuredActivationChoice,
    chosen,
    keeping,
    seconds_of,
)
from hydra_tune.shard.cost.compute_estimate import estimated_seconds
from hydra_tune.shard.cost.microbatch_search import PieceCountChoice, StepCostEstimate
from hydra_tune.shard.cost.pilot import ShardCost, ShardPilot, UpdatePilot
from hydra_tune.shard.cost.step_estimate import foreseen, foreseen_whole
from hydra_tune.shard.cost.update_pilot import optimizer_pilot
from hydra_tune.shard.execute.eager_plan import whole_plan
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.partition_planner import ShardPartitionPlanner
from hydra_tune.shard.partition.plan import ShardPlan, build_plan
from hydra_tune.shard.partition.plan_request import CapturedStep, ShardPlanRequest, TrialStateLayout, key_of
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.shard.partition.trial_step import answers_to, captured_graph, hollow_twin_of, restored, twin_of
from hydra_tune.shard.python_state.number_inputs import NumberInputError, NumberInputs
from hydra_tune.shard.python_state.opened_files import FileHolder
from hydra_tune.shard.python_state.state_guard import PythonStateGuard
from hydra_tune.shard.verify.plan_check import verify, verify_close
from hydra_tune.shard.verify.process_state import intraop_threads, preserved_streams, undisturbed
from hydra_tune.shard.verify.sample_check import SampledStep, sample_of
from hydra_tune.shard.verify.separable_optimizers import check_separable, is_told_by_key
from hydra_tune.shard.verify.step_outcome import StepEffects, UnitSeconds
from hydra_tune.shard.verify.value_numbering import ValueNumbering, ValuesNeededError
from hydra_tune.task import TrainTask

_MAX_PLANS = 128  # kinds of steps kept for future trials; running trials hold their own plans
_MAX_ANSWERS = 8  # plans kept for each kind, for steps that read values of the batch, numbers or files
_LONG_STEP_SECONDS = 1.0  # estimated seconds of a step beyond which numbers are quicker to compare than values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PreparedPlan:
    """A plan ready to run, and the times of its units.

    Attributes:
        seconds: seconds of each unit, measured or estimated; None for an eager plan, which was not run in units.
        guard: questions of the step's Python about the batch's values; None if there are none.
        smallest_budget: finds the smallest device memory in bytes that still allows a cut, to a per mille; for an eager
            plan, the bytes that the plan needs.
        effects: what the eager step does and the plan does not.
        is_checked: whether the plan is eager, or was compared with the eager step bit for bit.
        why: reason for the cut, if there was a choice; else None.
        placement_why: reason for the place of the updates, if there was a choice; else None.
        activation_choice: choice to be made once the units have been measured; None if the plan is final.
        numbers: inputs of the plan that Python computes from numbers; None if there are none.
        files: files that the step has read during its capture.
    """

    plan: ShardPlan
    seconds: UnitSeconds | None
    guard: BatchValueGuard | None = None
    smallest_budget: Callable[[], int]
    effects: StepEffects = field(default_factory=StepEffects)
    is_checked: bool = True
    why: str | None = None
    placement_why: str | None = None
    activation_choice: MeasuredActivationChoice | None = None
    numbers: NumberInputs | None = None
    files: tuple[FileHolder, ...] = ()

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the plan serves a batch with these tensors; the batch must have the prepared signature."""
        return self.guard is None or self.guard.holds(tensors)


@dataclass(frozen=True, slots=True)
class _PlanLibraryEntry:
    """A plan, or the reason for having none, for batches accepted by the guard."""

    guard: BatchValueGuard | None
    found: PreparedPlan | CaptureError


@dataclass(slots=True)
class _ShardPlanCache:
    """Plans by key, least recently used key first, and the lock of the libraries that share the plans."""

    plans: OrderedDict[Hashable, list[_PlanLibraryEntry]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, key: Hashable, entry: _PlanLibraryEntry) -> None:
        """Store an entry; drop the oldest entries of the key and the least recently used keys beyond the limits."""
        entries = self.plans.setdefault(key, [])
        if not any(known is entry for known in entries):
            entries.append(entry)
            del entries[:-_MAX_ANSWERS]
        self.plans.move_to_end(key)
        while len(self.plans) > _MAX_PLANS:
            self.plans.popitem(last=False)


class PlanLibrary:
    """Plans by the keys of `key_of` (`plan_request.py`).

    Args:
        most_checked_bytes: largest needs of a step whose plan is checked; None: all plans are checked.
        known: library of the same budget that checks all its plans; both libraries share the checked plans.

    Attributes:
        piece_counts: chosen numbers of pieces, by the situation of the choice.
    """

    def __init__(
        self, budget: ShardPlanConstraints, *, most_checked_bytes: int | None = None, known: "PlanLibrary | None" = None
    ) -> None:
        self.budget = budget
        self._most_checked_bytes = most_checked_bytes
        self.checked: _ShardPlanCache = _ShardPlanCache() if known is None else known.checked
        self.piece_counts: dict[Hashable, PieceCountChoice] = {} if known is None else known.piece_counts
        self._unchecked = _ShardPlanCache()
        self._packer = ShardPartitionPlanner(budget)
        # A single lock for both libraries of a pair, because the two share their checked plans.
        self._lock = self.checked.lock
        self._for_plans: PlanLibrary | None = None
        self._foreseen: dict[Hashable, CapturedStep] = {}  # steps measured by `foresee` that may be prepared next

    def for_plans(self, most_checked_bytes: int) -> "PlanLibrary":
        """Return the library for planning without training, with this library's budget.

        The same library is returned each time, so that equal plans are made once. The first call decides
        `most_checked_bytes`.
        """
        with self._lock:
            if self._for_plans is None:
                self._for_plans = PlanLibrary(self.budget, most_checked_bytes=most_checked_bytes, known=self)
            return self._for_plans

    def prepare(
        self,
        task: TrainTask,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        mode: str,
        like: TrialStateLayout | None = None,
        *,
        prefer_whole: bool = False,
    ) -> PreparedPlan:
        """Return the plan for a kind of batch of a trial; the random streams are restored.

        Args:
            task: describes the step.
            model: the trial's module, with its values on the host; only read.
            optimizer: the trial's optimizer; only read.
            batch: a batch; only read.
            mode: "train" or "evaluate".
            like: existing cut of the trial's state, if any. A further capture of the same model is cut at the same
                nodes if the graph has the same operators, else at the same parameters.
            prefer_whole: do not capture the kind of batch if the model fits whole, because the kind is unlikely to come
                again.

        Raises:
            BudgetError: a part that cannot be cut further does not fit.
            CaptureError: the model cannot be copied.
            ConfigError: a model without bytes cannot be captured.
            TaskError, MetricError: the step is wrong.
            NumberInputError: a step cannot be captured with the inputs of a `NumberedBatch`, or its plan was found wrong
                for other numbers.
        """
        leaves = batches.flatten(batch)
        request = ShardPlanRequest(
            task=task, model=model, optimizer=optimizer, leaves=leaves, batch=batch, mode=mode, like=like
        )
        if like is not None and like.plan.eager:
            with self._preparing():
                return self._whole(
                    request, CaptureError("its training runs whole, and may change what a graph would repeat for ever")
                )
        if prefer_whole:
            with self._preparing(), suppress(BudgetError):
                return self._whole(request, CaptureError("batches of too many kinds"))
        key = key_of(request)
        # The lock is held during a capture, too: trials of the same architecture wait for the plan instead of capturing.
        with self._preparing():
            # Checked plans come first, because their numbers are known to be right.
            entries = [e for cache in (self.checked, self._unchecked) for e in cache.plans.get(key, ())]
            # A guard replays operators on the batch, and operators may run other kernels during a capture.
            with GATE.shared():
                entry = next((e for e in entries if _serves(e, request)), None)
            if entry is None:
                foreseen_step = self._foreseen.get(key)
                if foreseen_step is not None and all(file.change() is None for file in foreseen_step.captured.files):
                    request = replace(request, foreseen=foreseen_step)
                outcome = self._capture(request)
                entry = _PlanLibraryEntry(request.guard, outcome)
            elif not isinstance(entry.found, CaptureError):
                _check_further_optimizer(request, entry.found.plan)
            # A measured step holds a whole graph, and only the first `prepare` after `foresee` can use the step.
            self._foreseen.clear()
            if key is not None:
                self._keep(key, entry)
            if isinstance(entry.found, CaptureError):
                if places := batches.places_of(batch):
                    raise NumberInputError(mode, places, entry.found)
                return replace(self._whole(request, entry.found), guard=entry.guard)
            if entry.found.numbers is not None and entry.found.numbers.is_refused:
                raise NumberInputError(
                    mode, batches.places_of(batch), "its plan gave other numbers than the eager step"
                )
            return entry.found

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Context in which the thread holds the lock, and steps run on the host; the random streams are restored at the end."""
        with ExitStack() as held:
            # The holder of the lock may wait for all others to leave the gate.
            with GATE.left():
                held.enter_context(self._lock)
            with preserved_streams(), preparing_for_gpus(self.budget.checks_sample):
                yield

    def check_again(self, prepared: PreparedPlan, task: TrainTask, model: nn.Module, batch: Any) -> None:
        """Compare a plan with the eager step once more, on the host.

        The plan serves `batch`, whose inputs are filled if the plan has inputs for numbers; model and batch are only
        read.

        Raises:
            CaptureError: the plan gives other numbers than the eager step.
        """
        mode = prepared.plan.mode
        with self._preparing(), undisturbed(task, mode), intraop_threads(self.budget.host_threads):
            verify(task, twin_of(model, mode), prepared.plan, batch)

    def confirm(self, prepared: PreparedPlan, task: TrainTask, model: nn.Module, batch: batches.NumberedBatch) -> None:
        """Compare a plan with the eager step for other numbers than those of its capture; arguments as of `check_again`.

        Raises:
            NumberInputError: the plan gives other numbers than the eager step.
        """
        assert prepared.numbers is not None, "the plan has inputs for numbers"
        try:
            self.check_again(prepared, task, model, batch)
        except CaptureError as error:
            prepared.numbers.is_refused = True
            raise NumberInputError(prepared.plan.mode, batch.places, error) from error
        prepared.numbers.is_confirmed = True

    def foresee(
        self, task: TrainTask, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> StepCostEstimate | None:
        """Predict the cost of a step of such batches without a clock.

        A step that can be cut runs only to answer questions of its Python about the batch. A step that cannot be cut
        runs on a copy, which measures its memory. Model, optimizer and batch are only read.

        Returns:
            The prediction; None if the step would not fit.

        Raises:
            ConfigError, TaskError: as of `prepare`.
        """
        leaves = batches.flatten(batch)
        request = ShardPlanRequest(
            task=task,
            model=model,
            optimizer=optimizer,
            leaves=leaves,
            batch=batch,
            mode="train",
            like=None,
            only_asks=True,
        )
        with self._preparing():
            estimate = self._look(request, [])
            if isinstance(estimate, CaptureError) and not is_unbuilt(model) and (answers := answers_to(request)):
                with_answers = self._look(request, answers)
                estimate = estimate if isinstance(with_answers, CaptureError) else with_answers
            with suppress(BudgetError):
                if not isinstance(estimate, CaptureError):
                    return estimate
                return foreseen_whole(self._packer, task, self._whole(request, estimate).plan)
        return None

    def _look(self, request: ShardPlanRequest, answers: list[Answer]) -> StepCostEstimate | CaptureError | None:
        """Predict the cost of a step cut into shards; the error if the step cannot be cut; None if the step does not fit."""
        try:
            step = self._measured_step(request, answers)
            estimate = foreseen(self._packer, request, step)
        except CaptureError as error:
            return CaptureError(str(error))
        except BudgetError:
            return None
        except HydraTuneError:
            raise
        except Exception as error:  # noqa: BLE001 - as in `_attempt`
            return CaptureError(f"the captured graph cannot be run in parts: {describe(error)}")
        if (key := key_of(request)) is not None and not answers:
            # Kept for `prepare`, which then skips the capture. A step with answers depends on the batch and is not
            # kept.
            self._foreseen[key] = step
        return estimate

    def _keep(self, key: Hashable, entry: _PlanLibraryEntry) -> None:
        is_checked = isinstance(entry.found, CaptureError) or entry.found.is_checked
        (self.checked if is_checked else self._unchecked).keep(key, entry)

    def _capture(self, request: ShardPlanRequest) -> PreparedPlan | CaptureError:
        """Return a verified plan, or the reason for having none; raise if the budget cannot be met."""
        outcome = self._attempt(request, [])
        # No answers for a step with inputs for numbers: they may depend on the numbers, and a guard replays constants.
        may_answer = not is_unbuilt(request.model) and not batches.places_of(request.batch)
        if isinstance(outcome, CaptureError) and may_answer and (answers := answers_to(request)):
            # Without answers first: a step that needs no answers has a single plan for all batches.
            with_answers = self._attempt(request, answers)
            return outcome if isinstance(with_answers, CaptureError) else with_answers
        return outcome

    def _attempt(self, request: ShardPlanRequest, answers: list[Answer]) -> PreparedPlan | CaptureError:
        try:
            measured_step = None if answers else request.foreseen
            return self._cut(request, measured_step or self._measured_step(request, answers))
        except CaptureError as error:
            # A new error: the library keeps the error, and the old error's traceback would keep the copy of the model.
            return CaptureError(str(error))
        except HydraTuneError:
            raise
        except Exception as error:  # noqa: BLE001 - a whole run shows the error if the step itself fails
            return CaptureError(f"the captured graph cannot be run in parts: {describe(error)}")

    def _measured_step(self, request: ShardPlanRequest, answers: list[Answer]) -> CapturedStep:
        captured = self._captured(request, request.batch, answers)
        if request.task.compile is not None and opaque_calls(captured.module):
            raise CaptureError("a compiler would trace the step's torch.autograd.Function")
        analysis, pilot = self._measured(request, captured, request.leaves.tensors)
        _check_gradients(captured, analysis)
        return CapturedStep(captured=captured, answers=answers, analysis=analysis, pilot=pilot)

    def _cut(self, request: ShardPlanRequest, step: CapturedStep) -> PreparedPlan:
        captured, answers, analysis = step.captured, step.answers, step.analysis
        nodes = len(captured.nodes)
        partition = self._packer.packed(request, step)
        pilot, partitioner, edges = partition.pilot, partition.partitioner, partition.edges
        for reason in filter(None, (partition.why, partition.placement_why)):
            CHOICES.info("%s", reason)
        plan = build_plan(captured, analysis, pilot, edges)
        if request.mode == "train" and request.like is None:
            plan = replace(plan, one_shard_bytes=pilot.cost(0, nodes).peak_bytes)
        room = self.budget.room(partition.buffer_bytes)
        # Compiled graphs save tensors through their own autograd functions, which do not cooperate with units.
        kept = plan if request.task.compile else keeping(plan, pilot, request.task.activations, room)
        if request.mode == "train" and len(plan.shards) > 1:
            _check_optimizer(request)
        is_checked = self._may_check(request, lambda: pilot.cost(0, nodes))
        # Cached and lazy: an estimate runs the forward of every shard on fake tensors.
        estimates = functools.cache(lambda: estimated_seconds(pilot, plan, kept))
        wanted, activation_choice = self._with_activations(request, plan, kept, estimates, room)
        # A choice to be made anew may end in either plan, so both are verified. So are both with code of the user's inside:
        # where memory runs out, a unit that kept its activations computes them again, and such code may count its calls.
        may_count = any(shard.graph.reads_state for shard in plan.shards) or bool(opaque_calls(captured.module))
        needs_both = activation_choice is not None or self.budget.checks_sample or may_count
        seconds: UnitSeconds | None
        kept_seconds: UnitSeconds | None
        if is_checked:
            seconds, kept_seconds = self._verified(
                request, captured, answers, plan, kept if needs_both else wanted, estimates, needs_both=needs_both
            )
        else:
            seconds, kept_seconds = estimates()
        if captured.numbers is not None and request.guard is not None:
            raise CaptureError(
                "the step's Python asks for values of the batch, and the answers may depend on the number"
            )
        if kept_seconds is None:
            activation_choice = None
        else:
            plan, seconds = wanted, kept_seconds if seconds is None else seconds_of(wanted, seconds, kept_seconds)
        if request.task.compile is not None:
            # Bits are compared without the compiler only; the compiled plan is compared up to rounding.
            one_shard_bytes = plan.one_shard_bytes
            plan = build_plan(captured, analysis, pilot, edges, request.task.compile)
            plan = replace(plan, one_shard_bytes=one_shard_bytes)
            with GATE.exclusive():  # the first run compiles
                seconds = verify_close(request.task, twin_of(request.model), plan, request.batch)
        # Lazy: the search measures many candidates.
        smallest = functools.cache(partial(partitioner.least_budget, self.budget.num_shards, plan.peak_bytes))
        return PreparedPlan(
            plan=plan,
            seconds=seconds,
            guard=request.guard,
            smallest_budget=smallest,
            effects=request.effects,
            is_checked=is_checked,
            why=partition.why,
            placement_why=partition.placement_why,
            activation_choice=activation_choice,
            numbers=captured.numbers,
            files=captured.files,
        )

    def _with_activations(
        self,
        request: ShardPlanRequest,
        plan: ShardPlan,
        kept: ShardPlan,
        estimates: Callable[[], tuple[UnitSeconds, UnitSeconds]],
        room: ActivationBudget,
    ) -> tuple[ShardPlan, MeasuredActivationChoice | None]:
        """Return the plan that keeps the activations worth keeping, and the choice to be made anew from measured times."""
        if kept is plan or request.task.activations != "auto":
            return kept, None
        link = self.budget.link()
        activation_choice = None
        if link is None and self.budget.speeds is not None:
            try:
                activation_choice = MeasuredActivationChoice(plan, kept, self.budget.speeds().link, room)
            except torch.OutOfMemoryError as error:
                CHOICES.info("activations that would move are recomputed: copies cannot be measured: %s", error)
        return chosen(plan, kept, *estimates(), link, room), activation_choice

    def _may_check(self, request: ShardPlanRequest, whole: Callable[[], ShardCost]) -> bool:
        """Whether a step may run on the host for a comparison with its plan; `whole` measures the step in one shard."""
        most = self._most_checked_bytes
        return most is None or (not is_unbuilt(request.model) and whole().peak_bytes <= most)

    def _captured(self, request: ShardPlanRequest, batch: Any, answers: list[Answer]) -> CapturedStepGraph:
        # A GPU multiplies by the inverse of a number, and divides by a tensor.
        return captured_graph(request, batch, answers, divides=not self.budget.checks_sample)

    def _measured(
        self, request: ShardPlanRequest, captured: CapturedStepGraph, tensors: tuple[Tensor, ...]
    ) -> tuple[GraphAnalysis, ShardPilot]:
        """Find the allowed cuts of a captured step, and make a pilot for the needs of its parts."""
        specs = state_specs(request.model)
        analysis = analyse(captured, specs, tensors)
        with GATE.shared():  # the pilot steps stand-ins; see `_check_optimizer`
            update = self._update_pilot(request, specs)
        pilot = ShardPilot(
            captured,
            analysis,
            specs,
            tensors,
            update=None if update is None else GATE.shared()(update),
            alignment=self.budget.alignment,
            groups={} if request.like is None else request.like.groups(specs),
            rules=GradientRules.of(request.task),
        )
        return analysis, pilot

    def _verified(
        self,
        request: ShardPlanRequest,
        captured: CapturedStepGraph,
        answers: list[Answer],
        plan: ShardPlan,
        kept: ShardPlan,
        estimates: Callable[[], tuple[UnitSeconds, UnitSeconds]],
        *,
        needs_both: bool,
    ) -> tuple[UnitSeconds | None, UnitSeconds | None]:
        """Verify a plan, or the plan that keeps activations, or both; results as of `verify`."""
        if self.budget.checks_sample or self._is_long(estimates):
            try:
                numbering = ValueNumbering()
                kept_seconds = self._verify(request, plan, kept, request.batch, numbering, needs_both=needs_both)[1]
                # The units have computed nothing, so their times are unknown.
                return estimates()[0], None if kept_seconds is None else estimates()[1]
            except (Exception, ValuesNeededError) as error:  # noqa: BLE001 - any failure is decided by values
                CHOICES.info("the plan is checked with values, which takes longer: %s", error)
            request.guards.clear()
        sample = self._sample(request, captured, answers, plan, kept) if self.budget.checks_sample else None
        if sample is not None:
            with suppress(Exception):  # any failure with few samples is decided by the whole batch
                found = self._verify(request, sample.plan, sample.kept, sample.batch)
                with GATE.shared():  # as in `prepare`
                    holds = request.guard is None or request.guard.holds(request.leaves.tensors)
                if holds:
                    seconds, kept_seconds = (None if each is None else sample.for_all(each) for each in found)
                    return seconds, kept_seconds
            # Guards of the failed attempt must not decide for the whole batch.
            request.guards.clear()
        return self._verify(request, plan, kept, request.batch, needs_both=needs_both)

    def _is_long(self, estimates: Callable[[], tuple[UnitSeconds, UnitSeconds]]) -> bool:
        """Whether a step is estimated to take longer on the host than a check by numbers.

        Planning without training always runs the step, for the times of its forecast.
        """
        if self._most_checked_bytes is not None:
            return False
        units = estimates()[0]
        return sum((*units.forward, *units.backward)) > _LONG_STEP_SECONDS

    def _verify(
        self,
        request: ShardPlanRequest,
        plan: ShardPlan,
        kept: ShardPlan,
        batch: Any,
        numbering: ValueNumbering | None = None,
        *,
        needs_both: bool = True,
    ) -> tuple[UnitSeconds | None, UnitSeconds | None]:
        distinct_kept = None if kept is plan else kept
        with undisturbed(request.task, request.mode), intraop_threads(self.budget.host_threads):
            twin = (
                twin_of(request.model, request.mode)
                if numbering is None
                else hollow_twin_of(request.model, request.mode)
            )
            return verify(
                request.task,
                twin,
                plan,
                batch,
                request.guards,
                distinct_kept,
                request.effects,
                numbering,
                needs_both=needs_both,
            )

    def _sample(
        self,
        request: ShardPlanRequest,
        captured: CapturedStepGraph,
        answers: list[Answer],
        plan: ShardPlan,
        kept: ShardPlan,
    ) -> SampledStep | None:
        try:
            return sample_of(
                captured,
                plan,
                kept,
                request.leaves,
                lambda batch: self._captured(request, batch, answers),
                lambda small, tensors: self._measured(request, small, tensors),
            )
        except Exception:  # noqa: BLE001 - some steps reject fewer samples
            return None

    def _whole(self, request: ShardPlanRequest, reason: CaptureError) -> PreparedPlan:
        if isinstance(request.batch, batches.NumberedBatch):  # the user's own code reads the numbers where they are
            batch = batches.unnumbered(request.batch)
            request = replace(request, batch=batch, leaves=batches.flatten(batch))
        if is_unbuilt(request.model):
            raise ConfigError(
                f"the model cannot be cut ({reason}), and the memory of a whole model is measured by a run, for which this "
                "model is too large here; make it capturable, or train some steps of it"
            ) from reason
        if request.like is not None:
            return self._whole_for(request, reason, updates_on_host=request.like.plan.updates_on_host)
        placement = self.budget.optimizer_placement
        if placement != "auto":
            return self._whole_for(request, reason, updates_on_host=placement == "host")
        try:
            # Updates on the device come first: they move no gradients and parameters, as long as everything fits.
            why = "updates on the device: the model runs whole, and fits with its optimizer state"
            return replace(self._whole_for(request, reason, updates_on_host=False), placement_why=why)
        except BudgetError:
            why = "updates on the host: the model runs whole, and would not fit with its optimizer state"
            return replace(self._whole_for(request, reason, updates_on_host=True), placement_why=why)

    def _whole_for(self, request: ShardPlanRequest, reason: CaptureError, *, updates_on_host: bool) -> PreparedPlan:
        specs = state_specs(request.model)
        twin = twin_of(request.model, request.mode)
        # The memory of a whole step is measured by running the step.
        with GATE.exclusive(), restored(request, twin):
            plan = whole_plan(
                request.task,
                request.model,
                twin,
                request.leaves,
                request.mode,
                specs=specs,
                update=self._update_pilot(request, specs),
                budget_bytes=self.budget.budget_bytes,
                alignment=self.budget.alignment,
                updates_on_host=updates_on_host,
                reason=reason,
            )
        return PreparedPlan(plan=plan, seconds=None, smallest_budget=lambda: plan.peak_bytes)

    def _update_pilot(self, request: ShardPlanRequest, specs: dict[str, StateSpec]) -> UpdatePilot | None:
        if request.mode != "train":
            return None
        parameters: dict[str, Tensor] = dict(request.model.named_parameters())
        return optimizer_pilot(
            request.optimizer,
            parameters,
            specs,
            alignment=self.budget.alignment,
            uses_foreach=self.budget.uses_foreach,
        )


def _check_optimizer(request: ShardPlanRequest) -> None:
    # Optimizers ask `torch.compiler.is_compiling()`, which a capture in another thread would change; hence the gate.
    with GATE.shared():
        check_separable(request.optimizer, dict(request.model.named_parameters()), state_specs(request.model))


def _check_further_optimizer(request: ShardPlanRequest, plan: ShardPlan) -> None:
    """Check the optimizer of a further trial that gets a plan; the plan was made for another trial's optimizer."""
    if request.mode != "train" or len(plan.shards) == 1 or is_told_by_key(request.optimizer):
        return
    like = request.like
    if like is None or like.plan.mode != "train" or len(like.plan.shards) == 1:  # else checked with the first plan
        _check_optimizer(request)


def _serves(entry: _PlanLibraryEntry, request: ShardPlanRequest) -> bool:
    """Whether an entry serves a batch with its tensors, and with the numbers and files that the step reads now."""
    if entry.guard is not None and not entry.guard.holds(request.leaves.tensors):
        return False
    if isinstance(entry.found, CaptureError):
        return True
    if any(file.change() is not None for file in entry.found.files):
        return False
    if entry.found.numbers is None:
        return True
    numbers = PythonStateGuard(request.task, request.model, request.mode, inputs=entry.found.numbers.places).numbers()
    return numbers is not None and entry.found.numbers.hold(numbers)


def _check_gradients(captured: CapturedStepGraph, analysis: GraphAnalysis) -> None:
    if captured.mode == "train" and not all(analysis.values[name].requires_grad for name in captured.outputs):
        raise CaptureError("the captured loss has no gradients")
