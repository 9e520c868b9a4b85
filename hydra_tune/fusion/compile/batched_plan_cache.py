"""`GroupPlanFactory`: make, compare, stack and trace the plans of groups.

A member's plan for a kind of batch is stacked and traced once for all groups of a pool that have the same size and the same
differences between members, as long as the factory keeps the plan. `GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes the
pool's factory. `GroupMatcher` (`pool/fusion/group_matcher.py`) compares trials through the pool's factory before a group is
formed. `GroupTrial` (`fusion/group/group_trial.py`) stacks plans for a group's size, and its `GroupPlanCache`
(`group_plan_cache.py`) asks the factory for plans when a group meets a new kind of batch. `PlannedSizeChooser`
(`fusion/runtime/planned_group_size.py`) asks for plans of steps that are to be planned. `GroupSizeChooser`
(`fusion/matching/group_size_chooser.py`) times groups on plans of a subclass, `UntracedPlanFactory`. `TaskProfileCache`
(`fusion/runtime/task_profiles.py`) and `FusionForecaster` (`pool/dry_run/fusion_report.py`) make factories of their own. The
module must not decide which trials are in a group.

Note: threads. Any thread may call. A capture runs the member's own code on the calling thread, with the member's streams.
A trace takes the capture gate alone, so no caller may hold the gate shared. `stacked` makes a plan with the
factory's lock held; captures, comparisons and traces run without the lock. Stacked plans are shared by all groups of a
pool: a plan must hold nothing of a group.
"""

import itertools
import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.compile.batched_plan import StackedPlanExecutor, is_traced, stacked_plan, trace_step
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.plan_diff import MemberDifferences, likeness
from hydra_tune.fusion.ragged.loss_heads import HeadAssignment
from hydra_tune.fusion.ragged.masked_loss import MaskedReduction
from hydra_tune.memory.pressure import is_out_of_memory
from hydra_tune.shard.capture.batch import NumberedBatch
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.shard.partition.plan_request import TrialStateLayout

_LOGGER = logging.getLogger("hydra_tune.fusion")
CUDA_GRAPHS = "cudagraphs"
"""Value of `backend` with which hydra-tune itself records steps as CUDA graphs (`cuda_graph_steps.py`)."""
_MAX_KEPT = 64  # stacked plans of each member's plan, and comparisons of groups
_MAX_PAIRS = 4096  # compared pairs of architectures: each trial of a search over dropout has an architecture of its own


class GroupPlanFactory:
    """Makes and caches the plans of groups for a pool.

    Args:
        backend: backend of `torch.compile` for traced steps; None: no compilation; `CUDA_GRAPHS`: record steps as CUDA
            graphs on GPUs.

    Attributes:
        records: whether steps are recorded.
    """

    def __init__(self, library: PlanLibrary, backend: str | None = None) -> None:
        self.records = backend == CUDA_GRAPHS
        self._backend = None if self.records else backend
        self._library = library
        self._lock = threading.Lock()
        self._compared: dict[Hashable, str] = {}  # differences of pairs of architectures; empty: alike
        self._likenesses: dict[tuple[PreparedPlan, ...], MemberDifferences] = {}  # by the plans of the members
        self._stacked: WeakKeyDictionary[PreparedPlan, dict[Hashable, PreparedPlan]] = WeakKeyDictionary()

    def of_member(
        self, member: MemberTrial, wanted: MemberBatchRequest, like: TrialStateLayout | None = None
    ) -> PreparedPlan:
        """Return a member's plan for a request.

        Args:
            member: any built member of the group; only read, except for the files that the member watches.
            wanted: the request.
            like: how the group's state is cut, if there is a state.

        Raises:
            UnfusableError: the plan cannot be stacked; the message gives the reason.
            HydraTuneError: as of `PlanLibrary.prepare`.
        """
        module, optimizer = member.built()
        # Capturing runs the model's code, whose draws must not touch the random streams of the process.
        with member.streams.everything():
            prepared = self._library.prepare(member.task, module, optimizer, wanted.batch, wanted.mode, like)
        # Capturing an evaluation leaves the module in evaluation mode.
        module.train()
        member.watch(wanted.mode, prepared.files)
        check_updates(prepared)
        if prepared.effects.changes_batch:
            raise UnfusableError("its step changes its batch, which a step of a group does not")
        return prepared

    def confirm(self, prepared: PreparedPlan, member: MemberTrial, wanted: MemberBatchRequest) -> None:
        """Compare a member's plan with the eager step once more, for the numbers of a request.

        Raises:
            NumberInputError: the plan gives other numbers than the eager step.
        """
        module, _ = member.built()
        batch = wanted.batch
        assert isinstance(batch, NumberedBatch), "the request has numbers"
        assert prepared.numbers is not None, "the plan has inputs for numbers"
        prepared.numbers.fill(batch.inputs, wanted.numbers)
        with member.streams.everything():
            self._library.confirm(prepared, member.task, module, batch)
        module.train()

    def of_members(
        self,
        members: Sequence[MemberTrial],
        wanted: MemberBatchRequest,
        like: TrialStateLayout | None = None,
        own: PreparedPlan | None = None,
    ) -> tuple[PreparedPlan, MemberDifferences]:
        """Return the first member's plan, with the differences of the others: dropout probabilities, losses and numbers.

        Args:
            members: built members of a group, or candidates; only read, likewise.
            wanted: a request of the first member.
            like: as of `of_member`.
            own: the first member's plan, if known. Asked for again, the library may have another plan: a step that was run
                for a check leaves results in caches of its functions, and a capture that finds a result there does not
                compute the result from a number.

        Returns:
            The plan, and the differences between the members.

        Raises:
            UnfusableError: as of `of_member`, or the members differ in anything else.
        """
        plans: dict[Hashable, PreparedPlan] = {}
        member_plans: list[PreparedPlan] = []
        for member in members:
            key = object() if member.architecture is None else member.architecture
            if key not in plans:
                plans[key] = own or self.of_member(member, wanted, like)
                own = None
            member.watch(wanted.mode, plans[key].files)
            member_plans.append(plans[key])
        differences = self._likeness(member_plans)
        if differences.rows is not None and any(plan.guard is not None for plan in member_plans):
            raise UnfusableError(
                "its loss differs from the others', and its step's Python code asks for values of the batch"
            )
        if any(plan.numbers is not None for plan in member_plans):
            differences = replace(differences, numbered=tuple(member_plans))
        return member_plans[0], differences

    def _likeness(self, own: Sequence[PreparedPlan]) -> MemberDifferences:
        key = tuple(own)
        with self._lock:
            cached_differences = self._likenesses.get(key)
        if cached_differences is not None:
            return cached_differences
        # Comparing graphs is slow, so compare outside the lock; two
        # threads may compare the same plans, with equal results.
        differences = likeness([prepared.plan for prepared in own])
        with self._lock:
            for earlier in self._likenesses.values():
                differences = _with_tails_of(differences, earlier)
            if len(self._likenesses) >= _MAX_KEPT:
                self._likenesses.clear()
            self._likenesses[key] = differences
        return differences

    def check_alike(self, first: MemberTrial, other: MemberTrial) -> None:
        """Refuse two built trials of equal family that still cannot share a group; only reads the trials.

        Raises:
            UnfusableError: the trials differ; the message names the difference.
        """
        if first.architecture == other.architecture:
            return
        pair = (first.architecture, other.architecture)
        difference = self._compared.get(pair)
        if difference is None:
            difference = self._difference(first, other)
            with self._lock:
                self._compared[pair] = difference
                if len(self._compared) > _MAX_PAIRS:
                    del self._compared[next(iter(self._compared))]
        if difference:
            raise UnfusableError(difference)

    def _difference(self, first: MemberTrial, other: MemberTrial) -> str:
        """Return the difference between two trials; empty: alike."""
        try:
            self._check_plans(first, other)
        except UnfusableError as error:
            return str(error)
        return ""

    def are_known(self, first: Hashable, other: Hashable) -> bool:
        """Return whether trials of two architectures are known to be alike."""
        return first == other or self._compared.get((first, other)) == ""

    def _check_plans(self, first: MemberTrial, other: MemberTrial) -> None:
        like: TrialStateLayout | None = None
        with first.peek() as first_batches, other.peek() as other_batches:
            # Training first: its plan decides how the state is cut.
            for request in _compared(first, other, other_batches | first_batches):
                prepared, differences = self.of_members([first, other], request, like)
                self.stacked(prepared, 2, slots=differences.drops, rows=differences.rows)
                like = like or layout_of(prepared)

    def stacked(
        self,
        prepared: PreparedPlan,
        count: int,
        slots: Iterable[str] = (),
        rows: HeadAssignment | None = None,
        counted: Mapping[str, MaskedReduction] | None = None,
    ) -> PreparedPlan:
        """Return a member's plan stacked for a group; arguments are as of `stacked_plan`.

        Groups with equal arguments get the same object, as long as the factory keeps the plan.

        Raises:
            UnfusableError: the plan cannot be stacked; the message gives the reason.
        """
        slot_names = frozenset(slots)
        with self._lock:
            stacked_plans = self._stacked.setdefault(prepared, {})
            key = (count, slot_names, rows, counted is not None)
            if key not in stacked_plans:
                # Stacked under the lock, so that all groups get the same object, whose trace they share.
                if len(stacked_plans) >= _MAX_KEPT:
                    stacked_plans.clear()
                stacked_plans[key] = replace(
                    prepared, plan=stacked_plan(prepared.plan, count, slot_names, rows, counted)
                )
            return stacked_plans[key]

    def trace(
        self,
        prepared: PreparedPlan,
        state: dict[str, Tensor],
        inputs: tuple[Tensor, ...],
        count: int,
        *,
        divisor: int = 1,
        may_compile: bool = True,
        place: torch.device | None = None,
    ) -> None:
        """Trace a group's plan if the plan has a single shard, has no trace, and no trace has failed before.

        A trace that has failed for lack of memory may be tried again.

        Args:
            prepared: the group's plan.
            state: stacked parameters and buffers.
            inputs: the stacked batch.
            count: number of members.
            divisor: divisor of every loss.
            may_compile: whether the step may be compiled; False for padded batches, because the check of the compiled
                code fills the counts of samples with zeros.
            place: the device to trace for; None: the CPU.
        """
        plan = prepared.plan
        kind = "cpu" if place is None else place.type
        is_on_gpu = kind != "cpu"
        assert isinstance(plan.computing, StackedPlanExecutor), "not a group's plan"
        # All devices wait for a trace, and a group asks again at each join.
        if len(plan.shards) > 1 or is_traced(plan) or kind in plan.computing.untraceable:
            return
        backend = self._backend if may_compile and not is_on_gpu else None
        # Torch's tracing state belongs to the whole process, so a trace holds the gate alone, as a capture does.
        with GATE.exclusive():
            try:
                tensors = [state[name] for name in plan.shards[0].graph.state]
                is_untraceable = not trace_step(plan, tensors, inputs, count, backend, divisor, place)
            except Exception as error:  # noqa: BLE001 - an untraced step runs operator by operator
                _LOGGER.info("a group's step is not traced: %s", error)
                is_untraceable = not is_out_of_memory(error)
        if is_untraceable:
            plan.computing.untraceable.add(kind)


def _compared(
    first: MemberTrial, other: MemberTrial, requests: dict[str, MemberBatchRequest]
) -> list[MemberBatchRequest]:
    """Return the batches on which two trials are compared, chosen from their first batches.

    If metrics may differ, an evaluation is included even where neither trial validates, because a later member may.
    """
    requests = {"train": requests.pop("train"), **requests}
    if (first.task.loss, first.task.evaluate) != (other.task.loss, other.task.evaluate):
        requests.setdefault("evaluate", replace(requests["train"], mode="evaluate"))
    return list(requests.values())


def _with_tails_of(found: MemberDifferences, other: MemberDifferences) -> MemberDifferences:
    """Return the differences with the heads of equal earlier differences.

    The caches of stacked plans have the `MultiHeadPlan` object in their keys, so equal differences share the object.
    """
    if found.rows is None or other.rows is None:
        return found
    plans, earlier_plans = found.rows.tails.plans, other.rows.tails.plans
    if len(plans) != len(earlier_plans) or any(
        plan is not earlier_plan for plan, earlier_plan in zip(plans, earlier_plans, strict=True)
    ):
        return found
    return replace(found, rows=replace(found.rows, tails=other.rows.tails))


def check_updates(prepared: PreparedPlan) -> None:
    """Refuse a plan whose updates run on the host, by an `UnfusableError`."""
    if prepared.plan.updates_on_host:
        raise UnfusableError("its updates are made on the host (optimizer_placement), and a group's on the device")


def room_for(prepared: PreparedPlan, budget_bytes: int, most: int, least: int = 2) -> int:
    """Return the number of members with a member's plan that fit a device, at most `most`.

    Raises:
        UnfusableError: fewer than `least` members fit.
    """
    room = min(most, budget_bytes // prepared.plan.peak_bytes)
    if room < least:
        raise UnfusableError("a device has no room for two of its kind at once")
    return room


def parts_of(plan: ShardPlan, count: int, budget_bytes: int) -> list[range]:
    """Return the slots that a group of `count` slots computes at once: all slots, or parts of about one size.

    An evaluation leaves parameters as they are, so members may be evaluated one part after the other, beside the state of
    all. A training step is never in parts.
    """
    if plan.mode == "train" or plan.peak_bytes <= budget_bytes:
        return [range(count)]
    costs = [shard.cost for shard in plan.shards]
    most = min(count * (budget_bytes - cost.state_bytes) // max(1, _beside_state(cost)) for cost in costs)
    num_parts = -(-count // max(1, most))
    edges = [count * number // num_parts for number in range(num_parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def most_evaluated(prepared: PreparedPlan, budget_bytes: int) -> int:
    """Return the number of members whose state fits a device beside the evaluation of one member."""
    costs = [shard.cost for shard in prepared.plan.shards]
    return min((budget_bytes - _beside_state(cost)) // max(1, cost.state_bytes) for cost in costs)


def _beside_state(cost: ShardCost) -> int:
    return cost.value_bytes + cost.forward_workspace


def layout_of(prepared: PreparedPlan) -> TrialStateLayout:
    """Return how the state of a trial is cut if the trial runs the given plan first."""
    owners = {name: shards[0] for name, shards in prepared.plan.used_state().items() if len(shards) == 1}
    return TrialStateLayout(plan=prepared.plan, owners=owners)
