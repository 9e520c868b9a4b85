"""The library of plans: each architecture is captured, cut, piloted and verified once, whoever asks first.

One library serves one pool, whose devices decide the budget that everything is cut for.
"""

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import BudgetError, CaptureError, ConfigError, HydraTuneError
from hydra_tune.quantities import format_bytes
from hydra_tune.shard import batch as batches
from hydra_tune.shard.activations import chosen, keeping, seconds_of
from hydra_tune.shard.analysis import Analysis, analyse
from hydra_tune.shard.answers import Answer, answering, ask
from hydra_tune.shard.budget import Budget
from hydra_tune.shard.capture import Captured, StateSpec, capture, describe, state_specs
from hydra_tune.shard.estimate import estimated_seconds
from hydra_tune.shard.fingerprint import architecture_key, optimizer_key
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.guards import Guard
from hydra_tune.shard.outcome import UnitSeconds
from hydra_tune.shard.packing import CHOICES, Choice, choose_packing
from hydra_tune.shard.pilot import Pilot, ShardCost, UpdatePilot
from hydra_tune.shard.placement import Cut, Placement, choose_placement, update_seconds
from hydra_tune.shard.plan import Plan, build_plan, operators
from hydra_tune.shard.precision import autocast, share_casts
from hydra_tune.shard.quick_partition import QuickPartitioner
from hydra_tune.shard.rules import GradientRules
from hydra_tune.shard.sample import Sample, sample_of
from hydra_tune.shard.separable import check_separable
from hydra_tune.shard.streams import intraop_threads, preserved_streams
from hydra_tune.shard.traffic import Habits
from hydra_tune.shard.unbuilt import bodiless_twin, export_mode, is_unbuilt, solid, without_bytes
from hydra_tune.shard.update_pilot import optimizer_pilot
from hydra_tune.shard.verify import verify, verify_close
from hydra_tune.shard.whole import whole_plan
from hydra_tune.task import TrainTask

_MAX_PLANS = 128  # kept for trials to come; those under way hold their own
_MAX_ANSWERS = 8  # kept for each kind of batch, where the step asks for values of the batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Prepared:
    """A plan ready to run, and how long its units took on the host.

    Attributes:
        plan: the step cut into shards.
        seconds: of each unit; None for an eager plan, which was not run in units.
        guard: what the step's Python asked of the batch's values; None if nothing.
        smallest_budget: finds the bytes of a device with which the step could still be cut, to a per mille.
        is_checked: whether its numbers have been compared with those of the eager step; else its seconds are estimates.
        why: why it was cut so, where there was a choice; else None.
        placement_why: why its updates are made where they are, where there was a choice; else None.
    """

    plan: Plan
    seconds: UnitSeconds | None
    guard: Guard | None = None
    smallest_budget: Callable[[], int]
    is_checked: bool = True
    why: str | None = None
    placement_why: str | None = None

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is for a batch with these tensors, which has the signature that it was prepared for."""
        return self.guard is None or self.guard.holds(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a trial's state has been cut: by its first plan, which further plans of the trial follow.

    Attributes:
        plan: the first plan.
        owners: parameter or buffer -> index of the only shard that uses it.
    """

    plan: Plan
    owners: dict[str, int]

    def groups(self, specs: dict[str, StateSpec]) -> dict[str, frozenset[str]]:
        """Each owned name -> all the names that are loaded with it."""
        members: dict[tuple[int, bool], set[str]] = {}
        for name, owner in self.owners.items():
            members.setdefault((owner, specs[name].is_parameter), set()).add(name)
        return {name: frozenset(names) for names in members.values() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    task: TrainTask
    model: nn.Module
    optimizer: torch.optim.Optimizer
    leaves: batches.Leaves
    batch: Any
    mode: str
    like: Layout | None
    guards: list[Guard] = field(default_factory=list)

    @property
    def guard(self) -> Guard | None:
        """The guard of the eager run, once there was one."""
        return self.guards[0] if self.guards else None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A plan, or why there is none, for the batches that the guard lets pass."""

    guard: Guard | None
    found: Prepared | CaptureError


@dataclass(slots=True)
class _Shelf:
    """Plans by key, the least recently used first; and the lock of whoever reads or writes them."""

    plans: OrderedDict[Hashable, list[_Entry]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, key: Hashable, entry: _Entry) -> None:
        """Put a plan there; those last used stay."""
        entries = self.plans.setdefault(key, [])
        if not any(known is entry for known in entries):
            entries.append(entry)
            del entries[:-_MAX_ANSWERS]
        self.plans.move_to_end(key)
        while len(self.plans) > _MAX_PLANS:
            self.plans.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """Where the shards of a step start and end, and why; `pilot` measures for the placement of updates that it is for."""

    pilot: Pilot
    partitioner: QuickPartitioner
    edges: list[int]
    buffer_bytes: int
    why: str | None = None
    placement_why: str | None = None


class PlanLibrary:
    """Plans by architecture, mode and batch signature.

    Args:
        budget: what to cut for.
        most_checked_bytes: what a step may need for its plan to be checked; None: all plans are.
        known: a library of the same budget, all of whose plans are checked: they serve here, and what is checked here serves
            there.

    Attributes:
        checked: those plans.
    """

    def __init__(
        self, budget: Budget, *, most_checked_bytes: int | None = None, known: "PlanLibrary | None" = None
    ) -> None:
        self.budget = budget
        self._most_checked_bytes = most_checked_bytes
        self.checked: _Shelf = _Shelf() if known is None else known.checked
        self._unchecked = _Shelf()
        self._lock = self.checked.lock
        self._for_plans: PlanLibrary | None = None

    def for_plans(self, most_checked_bytes: int) -> "PlanLibrary":
        """The library of those who only plan, for this one's budget; the same each time, so that plans alike are made once.

        Args:
            most_checked_bytes: what a step may need for its plan to be checked; of the first who asks.
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
        like: Layout | None = None,
        *,
        prefer_whole: bool = False,
    ) -> Prepared:
        """The plan for one kind of batch of a trial; the random streams are left as they were.

        Args:
            task: describes the step.
            model: the trial's module, with its values on the host; only read.
            optimizer: the trial's optimizer; only read.
            batch: a batch; only read.
            mode: "train" or "evaluate".
            like: how the trial's state has been cut, if it has: a further capture of the same model is cut at the same
                nodes if its graph has the same operators, else at the same parameters.
            prefer_whole: do not capture this kind of batch if the model fits whole: it will hardly come again.

        Raises:
            BudgetError: a part that cannot be cut further does not fit.
            TaskError, MetricError: the step is not right.
        """
        leaves = batches.flatten(batch)
        request = _Request(
            task=task, model=model, optimizer=optimizer, leaves=leaves, batch=batch, mode=mode, like=like
        )
        if like is not None and like.plan.eager:
            with self._lock, preserved_streams():
                return self._whole(
                    request, CaptureError("its training runs whole, and may change what a graph would repeat for ever")
                )
        if prefer_whole:
            with self._lock, preserved_streams(), suppress(BudgetError):
                return self._whole(request, CaptureError("batches of too many kinds"))
        architecture = architecture_key(task, model)
        key = None
        if architecture is not None:
            tail = (optimizer_key(optimizer), GradientRules.of(task), task.activations) if mode == "train" else None
            held = None
            if like is not None:
                held = (like.plan.mode, like.plan.cuts, like.plan.updates_on_host, frozenset(like.owners.items()))
            key = (architecture, mode, leaves.signature, tail, held)
        with self._lock, preserved_streams():
            entries = [e for shelf in (self.checked, self._unchecked) for e in shelf.plans.get(key, ())]
            with GATE.shared():
                entry = next((e for e in entries if e.guard is None or e.guard.holds(leaves.tensors)), None)
            if entry is None:
                found = self._capture(request)
                entry = _Entry(request.guard, found)
            if key is not None:
                self._keep(key, entry)
            if isinstance(entry.found, CaptureError):
                return replace(self._whole(request, entry.found), guard=entry.guard)
            return entry.found

    def _keep(self, key: Hashable, entry: _Entry) -> None:
        is_checked = isinstance(entry.found, CaptureError) or entry.found.is_checked
        (self.checked if is_checked else self._unchecked).keep(key, entry)

    def _capture(self, request: _Request) -> Prepared | CaptureError:
        """A verified plan, or why there is none; a budget that cannot be met is raised."""
        found = self._attempt(request, [])
        if isinstance(found, CaptureError) and not is_unbuilt(request.model) and (answers := _answers(request)):
            # Without answers first: a step that takes a path that needs none has one plan for all batches.
            with_answers = self._attempt(request, answers)
            return found if isinstance(with_answers, CaptureError) else with_answers
        return found

    def _attempt(self, request: _Request, answers: list[Answer]) -> Prepared | CaptureError:
        try:
            captured = _captured(request, request.batch, answers)
            return self._cut(request, captured, answers)
        except CaptureError as error:
            return CaptureError(str(error))
        except HydraTuneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever fails on fakes is run whole, and shown if that fails too
            return CaptureError(f"the captured graph cannot be run in parts: {describe(error)}")

    def _cut(self, request: _Request, captured: Captured, answers: list[Answer]) -> Prepared:
        analysis, pilot = self._measured(request, captured, request.leaves.tensors)
        _check_gradients(captured, analysis)
        nodes = len(captured.nodes)
        packed = self._packed(request, captured, analysis, pilot)
        pilot, partitioner, edges = packed.pilot, packed.partitioner, packed.edges
        for reason in filter(None, (packed.why, packed.placement_why)):
            CHOICES.info("%s", reason)
        plan = build_plan(captured, analysis, pilot, edges)
        room = self.budget.room(packed.buffer_bytes)
        # A compiler's graphs save through functions of their own, which know nothing of units.
        kept = plan if request.task.compile else keeping(plan, pilot, request.task.activations, room)
        with GATE.shared():
            if request.mode == "train" and len(plan.shards) > 1:
                check_separable(request.optimizer, dict(request.model.named_parameters()), state_specs(request.model))
        is_checked = self._may_check(request, pilot.cost(0, nodes))
        estimates = functools.cache(lambda: estimated_seconds(pilot, plan, kept))
        seconds: UnitSeconds
        kept_seconds: UnitSeconds | None
        if is_checked:
            seconds, kept_seconds = self._verified(request, captured, answers, plan, kept)
        else:
            seconds, kept_seconds = estimates()
        if kept_seconds is not None:
            if request.task.activations == "auto":
                kept = chosen(plan, kept, *estimates(), self.budget.link(), room)
            plan, seconds = kept, seconds_of(kept, seconds, kept_seconds)
        if request.task.compile is not None:
            plan = build_plan(captured, analysis, pilot, edges, request.task.compile)
            with GATE.exclusive():  # the first run compiles
                seconds = verify_close(request.task, _twin(request.model), plan, request.batch)
        smallest = functools.cache(partial(partitioner.least_budget, self.budget.num_shards, plan.peak_bytes))
        return Prepared(
            plan=plan,
            seconds=seconds,
            guard=request.guard,
            smallest_budget=smallest,
            is_checked=is_checked,
            why=packed.why,
            placement_why=packed.placement_why,
        )

    def _packed(self, request: _Request, captured: Captured, analysis: Analysis, pilot: Pilot) -> _Packed:
        """The step cut into shards, for updates where they are made."""
        like, wanted = request.like, self.budget.optimizer_placement
        if like is not None:  # its optimizer state is where it is
            return self._packed_for(
                request, captured, analysis, pilot.placed(updates_on_host=like.plan.updates_on_host)
            )
        if wanted != "auto" or request.mode != "train":
            return self._packed_for(request, captured, analysis, pilot.placed(updates_on_host=wanted == "host"))
        on_device = None
        with suppress(BudgetError):
            on_device = self._packed_for(request, captured, analysis, pilot)
        on_host = self._packed_for(request, captured, analysis, pilot.placed(updates_on_host=True))
        choice = self._placement(request, captured, analysis, on_device, on_host)
        packed = on_host if choice.place == "host" or on_device is None else on_device
        return replace(packed, placement_why=choice.reason)

    def _packed_for(self, request: _Request, captured: Captured, analysis: Analysis, pilot: Pilot) -> _Packed:
        """With the smallest buffer into which the parameters of each shard fit; else the largest with which it can be cut."""
        found: _Packed | None = None
        for buffer_bytes in self.budget.buffers:
            try:
                packed = self._packed_beside(request, captured, analysis, pilot, buffer_bytes)
            except BudgetError:
                if found is None:
                    raise
                break
            found, largest = packed, max(pilot.cost(*span).state_bytes for span in pairwise(packed.edges))
            if len(packed.edges) == 2 or largest <= buffer_bytes:  # noqa: PLR2004 - one shard needs no buffer
                break
        assert found is not None, "there is a buffer to try"
        is_choice = self.budget.buffer_fraction == "auto" and request.like is None
        return _told_of_buffer(found, self.budget.budget_bytes) if is_choice else found

    def _packed_beside(
        self, request: _Request, captured: Captured, analysis: Analysis, pilot: Pilot, buffer_bytes: int
    ) -> _Packed:
        partitioner = QuickPartitioner(
            pilot,
            analysis,
            len(captured.nodes),
            budget_bytes=self.budget.budget_bytes,
            buffer_bytes=buffer_bytes,
        )
        packed = partial(_Packed, pilot=pilot, partitioner=partitioner, buffer_bytes=buffer_bytes)
        if request.like is not None:
            return packed(edges=partitioner.partition(None, _cuts_like(captured, analysis, request.like)))
        edges = partitioner.partition(self.budget.num_shards)
        if self.budget.num_shards != "tuned" or not _may_be_tuned(request, edges):
            return packed(edges=edges)
        plan = build_plan(captured, analysis, pilot, edges)
        choice = self._tuned(request.task, partitioner, plan, pilot, edges, buffer_bytes)
        return packed(edges=list(choice.packing.edges), why=choice.reason)

    def _placement(
        self, request: _Request, captured: Captured, analysis: Analysis, on_device: _Packed | None, on_host: _Packed
    ) -> Placement:
        """Where updates are expected to take less time."""
        assert self.budget.speeds is not None, "auto comes with the speeds of the machine"
        speeds = self.budget.speeds()

        def plan_of(packed: _Packed) -> Plan:
            return build_plan(captured, analysis, packed.pilot, packed.edges)

        def cut(packed: _Packed) -> Cut:
            measure = self._measure(request.task, packed.pilot, packed.edges[-1], packed.buffer_bytes)
            plan = plan_of(packed)
            return Cut(
                costs=[measure(first, last) for first, last in pairwise(packed.edges)],
                seconds=estimated_seconds(packed.pilot, plan, plan)[0] if speeds.is_host else None,
            )

        with GATE.shared():
            rate = update_seconds(request.optimizer, list(request.model.parameters()))
        return choose_placement(
            None if on_device is None else cut(on_device),
            cut(on_host),
            self.budget.budget_bytes,
            self._habits(request.task, plan_of(on_host)),
            speeds,
            rate,
        )

    def _may_check(self, request: _Request, whole: ShardCost) -> bool:
        """Whether a step may be run on the host, to be compared with its plan."""
        most = self._most_checked_bytes
        return most is None or (whole.peak_bytes <= most and not is_unbuilt(request.model))

    def _tuned(
        self,
        task: TrainTask,
        partitioner: QuickPartitioner,
        plan: Plan,
        pilot: Pilot,
        largest: list[int],
        buffer_bytes: int,
    ) -> Choice:
        """Where the shards start and end with which a step moves the fewest bytes."""
        measure = self._measure(task, pilot, largest[-1], buffer_bytes)
        return choose_packing(largest, partitioner.packed, measure, self.budget.budget_bytes, self._habits(task, plan))

    def _habits(self, task: TrainTask, plan: Plan) -> Habits:
        """How a step of a task uses its shards; `plan` is one that it may be cut by."""
        counted = self.budget.counts_draws or not plan.is_stochastic
        return Habits(
            waits=GradientRules.of(task).has_two_phases,
            sends_ahead=self.budget.sends_ahead,
            num_batches=task.accumulate * task.split_batches,
            may_group=counted and plan.may_be_pipelined,
        )

    def _measure(self, task: TrainTask, pilot: Pilot, end: int, buffer_bytes: int) -> Callable[[int, int], ShardCost]:
        """What a shard of a step of so many nodes costs, with the activations that it is expected to keep."""
        room = self.budget.room(buffer_bytes)
        # "auto" keeps most of what it can where units and copies can be compared, and nothing elsewhere.
        keeps = task.activations in ("keep", "spill") or (task.activations == "auto" and self.budget.link() is not None)

        def measure(first: int, last: int) -> ShardCost:
            kept = pilot.cost_keeping(first, last) if keeps and last < end and task.compile is None else None
            return pilot.cost(first, last) if kept is None or kept.peak_bytes > room.capacity_bytes else kept

        return measure

    def _measured(self, request: _Request, captured: Captured, tensors: tuple[Tensor, ...]) -> tuple[Analysis, Pilot]:
        """Where a captured step may be cut, and what its parts would need."""
        specs = state_specs(request.model)
        analysis = analyse(captured, specs, tensors)
        pilot = Pilot(
            captured,
            analysis,
            specs,
            tensors,
            update=self._update_pilot(request, specs),
            alignment=self.budget.alignment,
            groups={} if request.like is None else request.like.groups(specs),
            rules=GradientRules.of(request.task),
        )
        return analysis, pilot

    def _verified(
        self, request: _Request, captured: Captured, answers: list[Answer], plan: Plan, kept: Plan
    ) -> tuple[UnitSeconds, UnitSeconds | None]:
        """Seconds of the units of a plan and of the one that keeps activations, once both are known to be right."""
        sample = self._sample(request, captured, answers, plan, kept) if self.budget.checks_sample else None
        if sample is not None:
            with suppress(Exception):  # whatever is wrong with the few samples, all of them decide
                found = self._verify(request, sample.plan, sample.kept, sample.batch)
                if request.guard is None or request.guard.holds(request.leaves.tensors):
                    return sample.for_all(found[0]), None if found[1] is None else sample.for_all(found[1])
            request.guards.clear()
        return self._verify(request, plan, kept, request.batch)

    def _verify(self, request: _Request, plan: Plan, kept: Plan, batch: Any) -> tuple[UnitSeconds, UnitSeconds | None]:
        other = None if kept is plan else kept
        with GATE.shared(), intraop_threads(self.budget.host_threads):
            return verify(request.task, _twin(request.model), plan, batch, request.guards, other)

    def _sample(
        self, request: _Request, captured: Captured, answers: list[Answer], plan: Plan, kept: Plan
    ) -> Sample | None:
        try:
            return sample_of(
                captured,
                plan,
                kept,
                request.leaves,
                lambda batch: _captured(request, batch, answers),
                lambda small, tensors: self._measured(request, small, tensors),
            )
        except Exception:  # noqa: BLE001 - a step may have its reasons not to take fewer samples
            return None

    def _whole(self, request: _Request, reason: CaptureError) -> Prepared:
        if is_unbuilt(request.model):
            raise ConfigError(
                f"the model cannot be cut ({reason}), and what it needs whole is found by running it, for which it is too "
                "large here; make it capturable, or train some steps of it"
            ) from reason
        if request.like is not None:
            return self._whole_for(request, reason, updates_on_host=request.like.plan.updates_on_host)
        wanted = self.budget.optimizer_placement
        if wanted != "auto":
            return self._whole_for(request, reason, updates_on_host=wanted == "host")
        try:
            why = "updates on the device: the model runs whole, and fits with its optimizer state"
            return replace(self._whole_for(request, reason, updates_on_host=False), placement_why=why)
        except BudgetError:
            why = "updates on the host: the model runs whole, and would not fit with its optimizer state"
            return replace(self._whole_for(request, reason, updates_on_host=True), placement_why=why)

    def _whole_for(self, request: _Request, reason: CaptureError, *, updates_on_host: bool) -> Prepared:
        specs = state_specs(request.model)
        with GATE.shared():
            plan = whole_plan(
                request.task,
                request.model,
                _twin(request.model),
                request.leaves,
                request.mode,
                specs=specs,
                update=self._update_pilot(request, specs),
                budget_bytes=self.budget.budget_bytes,
                alignment=self.budget.alignment,
                updates_on_host=updates_on_host,
                reason=reason,
            )
        return Prepared(plan=plan, seconds=None, smallest_budget=lambda: plan.peak_bytes)

    def _update_pilot(self, request: _Request, specs: dict[str, StateSpec]) -> UpdatePilot | None:
        if request.mode != "train":
            return None
        parameters: dict[str, Tensor] = dict(request.model.named_parameters())
        return optimizer_pilot(request.optimizer, parameters, specs, alignment=self.budget.alignment)


def _told_of_buffer(packed: _Packed, budget_bytes: int) -> _Packed:
    """With a sentence on the buffer, where there is one."""
    if len(packed.edges) == 2:  # noqa: PLR2004 - one shard has none
        return packed
    largest = max(packed.pilot.cost(*span).state_bytes for span in pairwise(packed.edges))
    told = (
        f"{format_bytes(packed.buffer_bytes)} ({packed.buffer_bytes / budget_bytes:.0%} of the device) are kept for loading, "
        f"and the largest shard's parameters take {format_bytes(largest)}"
    )
    return replace(packed, why=told if packed.why is None else f"{packed.why}; {told}")


def _may_be_tuned(request: _Request, edges: list[int]) -> bool:
    """Whether there is a cut to tune."""
    return request.mode == "train" and len(edges) > 2  # noqa: PLR2004


def _twin(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot be copied: {describe(error)}") from error


def _captured(request: _Request, batch: Any, answers: list[Answer]) -> Captured:
    """The step for a batch as a graph."""
    if is_unbuilt(request.model):
        return _captured_unbuilt(request, batch)
    twin = _twin(request.model)
    with GATE.exclusive(), autocast(request.task.precision):
        captured = capture(request.task, twin, batch, request.mode, answering(answers))
    share_casts(captured, state_specs(request.model), captured.precision)
    return captured


def _captured_unbuilt(request: _Request, batch: Any) -> Captured:
    """The same of a model without bytes."""
    mode = export_mode()
    with mode:
        twin = bodiless_twin(request.model)[0]
    fakes = without_bytes(mode, batches.plain_mappings(batch))
    with GATE.exclusive(), autocast(request.task.precision):
        captured = capture(request.task, twin, fakes, request.mode)
    share_casts(captured, state_specs(request.model), captured.precision)
    return replace(captured, constants={name: solid(tensor) for name, tensor in captured.constants.items()})


def _answers(request: _Request) -> list[Answer]:
    """What the step's Python asks of this batch; empty where that is of no help."""
    with GATE.shared(), suppress(Exception):  # an error in the user's code comes up again where the model runs whole
        return ask(request.task, _twin(request.model), request.mode, batches.copied(request.batch))
    return []


def _check_gradients(captured: Captured, analysis: Analysis) -> None:
    if captured.mode == "train" and not all(analysis.values[name].requires_grad for name in captured.outputs):
        raise CaptureError("the captured loss has lost its gradients (reentrant checkpoints do that)")


def _cuts_like(captured: Captured, analysis: Analysis, like: Layout) -> list[int]:
    if operators(captured) == like.plan.operators and set(like.plan.cuts) <= set(analysis.cuts):
        return list(like.plan.cuts)
    return _owner_cuts(captured, analysis, like.owners)


def _owner_cuts(captured: Captured, analysis: Analysis, owners: dict[str, int]) -> list[int]:
    """Cuts before the first use of each further shard's own parameters."""
    positions = {node: position for position, node in enumerate(captured.nodes)}
    reached, cuts = 0, []
    allowed = analysis.cuts
    for node in captured.nodes:
        used = (captured.state.get(argument.name) for argument in node.all_input_nodes)
        owner = max((owners[name] for name in used if name is not None and name in owners), default=0)
        if owner > reached:
            reached = owner
            before = [cut for cut in allowed if cut <= positions[node]]
            cuts += before[-1:]
    return sorted(set(cuts))
