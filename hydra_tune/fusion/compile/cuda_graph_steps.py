"""Record a group's traced step as a CUDA graph, and replay the graph while the group's state keeps its addresses.

`GroupTrial` (`fusion/group/group_trial.py`) runs traced training steps of a single batch on a GPU through
`GroupCaptureCache` if the user sets `fusion_compile="cudagraphs"`, and closes the cache before the state is replaced or
released. `GroupRound` (`fusion/group/multi_step_unit.py`) and `GroupBatch` (`fusion/group/group_step.py`) take the
generator's turn before such a step, and give the `CapturedPlanExecutor` the unit's lease. The module must not decide which
trials are in a group.

Note: locks. A thread takes the generator's turn before the capture gate. `GroupCaptureCache` has no lock: a group runs
one unit at a time. The thread that needs a recording's room may drop the recording (`DeviceCacheReservation`).

Note: contents of a graph. Forward and backward read parameters and buffers at fixed addresses, and read copies of the
batch, the constants and the random numbers, which the group refreshes before each replay. Random numbers are drawn in
advance, as for any traced step, so no generator is part of a graph. The optimizer's step stays outside: rates and step
counts are read at every step, and no schedule is baked into a graph. Gradients and losses are copied out, because the
next replay overwrites the memory of the graph's outputs.

Note: moving state. A spilled shard returns to another address, and a graph cannot follow. The step is recorded again at
the second step in a row at the same addresses, and given up when a ninth recording is due (`GraphReplayPolicy`).

Note: memory. A graph holds the memory of its step exclusively between replays. The device's ledger lists the memory as
room that is released before any block is spilled (`DeviceCaches.hold`). A released step is recorded again later, by the
same rules.

Note: verification. A fresh recording is replayed and compared with the traced step, from the same state. A recording
that fails, or differs by more than a rounding tolerance (`difference` of `torch_compile.py`), is dropped, the step is not
recorded again, and the log gives the reason. The step that makes a recording returns the traced step's results.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hydra_tune.batched.joint_graph import JointTrace
from hydra_tune.devices.cuda_graphs import CudaRecorder, CudaRecording
from hydra_tune.fusion.compile.batched_plan import StackedPlanExecutor, scales_of
from hydra_tune.fusion.compile.torch_compile import difference
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.ledger import DeviceCacheReservation
from hydra_tune.shard.capture.step_capture import describe
from hydra_tune.shard.capture.step_module import Objective, loss_itself
from hydra_tune.shard.execute.compute import IncomingGradients, ShardGradients, ShardOperands, ShardTape
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph

_LOGGER = logging.getLogger("hydra_tune.fusion")
_STEADY_STEPS = 2  # steps in a row at the same addresses, the last of which is recorded
_MOST_RECORDINGS = 8  # recordings of a kind of step before giving up
_NO_ROOM = "its device has no room for what a graph keeps for itself"
_MOST_KINDS = 4  # kinds of steps kept recorded; each holds separate memory


class GraphReplayPolicy:
    """Decides when a step is recorded, replayed or run plainly, from addresses and earlier recordings; touches no tensor."""

    def __init__(self) -> None:
        self.why = ""
        self._last: Hashable = None
        self._stayed = 0
        self._recorded: Hashable = None
        self._count = 0

    def next(self, addresses: Hashable) -> str:
        """Return the action for the next step.

        Returns:
            "run", "record" or "replay".
        """
        self._stayed = self._stayed + 1 if addresses == self._last else 1
        self._last = addresses
        if self.why:
            return "run"
        if self._recorded is not None and addresses == self._recorded:
            return "replay"
        if self._stayed < _STEADY_STEPS:
            return "run"
        if self._count >= _MOST_RECORDINGS:
            self.give_up(f"its state was moved, or its memory wanted, after each of {self._count} recordings")
            return "run"
        return "record"

    def recorded(self) -> None:
        """Note that the last step was recorded, and that the recording agrees with the traced step."""
        self._recorded = self._last
        self._count += 1

    def forget(self) -> None:
        """Note that the recording is gone."""
        self._recorded = None

    def give_up(self, why: str) -> None:
        """Stop recording the step, for the given reason."""
        self.why = why
        self._recorded = None
        _LOGGER.warning("a group's step is not replayed as a CUDA graph: %s", why)


@dataclass(slots=True)
class _StepCaptureState:
    trace: JointTrace
    course: GraphReplayPolicy = field(default_factory=GraphReplayPolicy)
    recording: CudaRecording | None = None
    given: Sequence[Tensor] = ()
    held: DeviceCacheReservation | None = None

    def let_go(self) -> None:
        """Drop the recording, which may be made again. The caller releases the room on the ledger."""
        self.course.forget()
        recording, self.recording, self.given = self.recording, None, ()
        if recording is not None:
            recording.drop()


class GroupCaptureCache:
    """The recorded steps of a group."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder
        self._kept: OrderedDict[tuple[int, str], _StepCaptureState] = OrderedDict()
        self._plans: dict[int, tuple[ShardPlan, ShardPlan]] = {}

    def of(self, plan: ShardPlan) -> ShardPlan:
        """Return a group's plan in a form that runs recorded steps where possible; usually the same object for the same plan.

        A fifth plan, or `close`, makes the cache forget the earlier objects.
        """
        plan_pair = self._plans.get(id(plan))
        if plan_pair is None:
            if len(self._plans) >= _MOST_KINDS:
                self._plans.clear()
            assert isinstance(plan.computing, StackedPlanExecutor), "not a group's plan"
            # The pair holds the plan, so that no other object gets its id.
            plan_pair = self._plans[id(plan)] = plan, replace(plan, computing=CapturedPlanExecutor(plan, self))
        return plan_pair[1]

    def close(self) -> None:
        """Drop all recordings and release their room."""
        for step_state in self._kept.values():
            _part(step_state)
        self._kept.clear()
        self._plans.clear()

    def run(
        self,
        trace: JointTrace,
        shard: ShardGraph,
        operands: ShardOperands,
        room_bytes: int,
        lease: Lease | None,
        noise: list[Tensor],
        *,
        is_laid_out: bool = False,
    ) -> ShardGradients:
        """Run a step: replay, record or run plainly."""
        place = operands.state[0].device
        # A group may run on several devices in turn, and a graph belongs to one.
        step_state = self._kept_for(trace, str(place) if lease is None else lease.place)
        action = step_state.course.next(tuple([tensor.data_ptr() for tensor in operands.state]))
        if action == "replay" and step_state.recording is not None:
            step_inputs = [*operands.constants, *operands.inputs, *noise]
            return _replayed(step_state, step_state.recording, step_inputs, operands, is_laid_out=is_laid_out)
        if step_state.recording is not None and action != "replay":
            _part(step_state)  # the state has moved: the graph would read stale addresses
        # Without a lease no room can be taken for a recording.
        if action != "record" or lease is None:
            return trace.run(operands, noise, is_laid_out=is_laid_out)
        return self._recorded(step_state, shard, operands, noise, room_bytes, lease)

    def _kept_for(self, trace: JointTrace, place: str) -> _StepCaptureState:
        key = (id(trace), place)
        if key not in self._kept:
            while len(self._kept) >= _MOST_KINDS:
                _part(self._kept.popitem(last=False)[1])
            # The state holds the trace, so that no other trace gets its id.
            self._kept[key] = _StepCaptureState(trace)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _recorded(
        self,
        kept: _StepCaptureState,
        shard: ShardGraph,
        operands: ShardOperands,
        noise: list[Tensor],
        room_bytes: int,
        lease: Lease,
    ) -> ShardGradients:
        step_inputs = [*operands.constants, *operands.inputs, *noise]
        # Inputs exist twice beside the batch itself: as copies that
        # the graph reads, and as originals for the comparison.
        own_bytes = 2 * sum(tensor.nbytes for tensor in step_inputs)
        # Before the recording: the ledger counts memory before it is allocated.
        kept.held = lease.hold(room_bytes + own_bytes, kept.let_go)
        if kept.held is None:
            kept.course.give_up(_NO_ROOM)
            return kept.trace.run(operands, noise)
        buffers = [operands.state[shard.state.index(name)].detach() for name in shard.written_state]
        # Recording executes the step twice, and its check replays the graph. Written buffers are
        # restored after the recording and after the replay, so the net effect is a single step.
        buffers_before = [tensor.clone() for tensor in buffers]
        originals = [tensor.clone() for tensor in step_inputs]
        kept.given = [tensor.clone() for tensor in step_inputs]
        why = ""
        try:
            kept.recording = self._recorder.record(lambda: _flat(kept.trace, operands, kept.given))
            needed_bytes = kept.recording.nbytes + own_bytes
            if needed_bytes > kept.held.nbytes:  # the allocator gives a graph's pool whole segments
                kept.held.release()
                kept.held = lease.hold(needed_bytes, kept.let_go)
                why = "" if kept.held is not None else f"{_NO_ROOM}: {needed_bytes} bytes"
        except Exception as error:  # noqa: BLE001 - many things cannot be captured, and the step can do without
            why = f"it cannot be recorded: {describe(error)}"
        _put(buffers, buffers_before)
        if kept.recording is None or why:
            _part(kept)
            kept.course.give_up(why)
            return kept.trace.run(operands, noise)
        # From the originals, because a step may overwrite its inputs, and recording has run the step twice.
        replayed = _outputs(kept.trace, _replayed(kept, kept.recording, originals, operands))
        replayed_buffers = [tensor.clone() for tensor in buffers]
        _put(buffers, buffers_before)
        result = kept.trace.run(operands, noise)
        why = difference(_outputs(kept.trace, result), replayed) or difference(buffers, replayed_buffers)
        if why:
            _part(kept)
            kept.course.give_up(why)
        else:
            kept.course.recorded()
            _LOGGER.info("the step of a group of %d is replayed as a CUDA graph", operands.state[0].size(0))
        return result


@dataclass(slots=True)
class CapturedPlanExecutor:
    """Runs a group's plan, with training steps recorded where possible."""

    plan: ShardPlan
    captures: GroupCaptureCache
    lease: Lease | None = None

    @property
    def stacked(self) -> StackedPlanExecutor:
        """The computing for steps that are not recorded."""
        assert isinstance(self.plan.computing, StackedPlanExecutor), "not a group's plan"
        return self.plan.computing

    def forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `compute.forward`."""
        return self.stacked.forward(shard, operands, needs_gradient)

    def taped_forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], ShardTape]:
        """As `compute.taped_forward`."""
        return self.stacked.taped_forward(shard, operands, needs_gradient)

    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        *,
        needs_gradient: frozenset[str],
        incoming: IncomingGradients,
        objective: Objective = loss_itself,
    ) -> ShardGradients:
        """As `compute.backward`."""
        trace = self.stacked.trace_on(shard, operands)
        if trace is None or trace.code is not None:
            return self.stacked.backward(
                shard, operands, needs_gradient=needs_gradient, incoming=incoming, objective=objective
            )
        return self.recorded(trace, shard, operands, trace.draw(operands.state[0].device, scales_of(objective)))

    def recorded(
        self,
        trace: JointTrace,
        shard: ShardGraph,
        operands: ShardOperands,
        noise: list[Tensor],
        *,
        is_laid_out: bool = False,
    ) -> ShardGradients:
        """Run a traced step recorded, where possible; arguments as of `GroupCaptureCache.run`."""
        (cost,) = [plan_shard.cost for plan_shard in self.plan.shards]
        room_bytes = max(cost.forward_workspace, cost.backward_workspace) + cost.trained_bytes
        return self.captures.run(trace, shard, operands, room_bytes, self.lease, noise, is_laid_out=is_laid_out)


def _flat(trace: JointTrace, operands: ShardOperands, given: Sequence[Tensor]) -> list[Tensor]:
    inputs_begin, noise_begin = len(operands.constants), len(operands.constants) + len(operands.inputs)
    step_operands = replace(operands, constants=given[:inputs_begin], inputs=given[inputs_begin:noise_begin])
    return _outputs(trace, trace.run(step_operands, list(given[noise_begin:])))


def _outputs(trace: JointTrace, made: ShardGradients) -> list[Tensor]:
    return [made.outputs[trace.loss], *made.parameters.values()]


def _replayed(
    kept: _StepCaptureState,
    recording: CudaRecording,
    given: Sequence[Tensor],
    operands: ShardOperands,
    *,
    is_laid_out: bool = False,
) -> ShardGradients:
    """Replay a step on the given constants, inputs and noise, and copy the results out."""
    # The copies, the replay and the copies of the outputs are
    # queued on the same stream, so no synchronization is needed.
    _put(kept.given, given)
    recording.replay()
    losses, *gradients = recording.outputs
    room = (
        kept.trace.room(operands, is_laid_out=True)
        if is_laid_out
        else dict(enumerate(map(torch.empty_like, gradients)))
    )
    results = [torch.empty_like(losses), *(room[index] for index in range(len(gradients)))]
    _put(results, recording.outputs)
    losses, *gradients = results
    named: Mapping[str, Tensor] = dict(zip(kept.trace.trained, gradients, strict=True))
    return ShardGradients(live_in={}, parameters=dict(named), outputs={kept.trace.loss: losses})


def _put(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _part(kept: _StepCaptureState) -> None:
    kept.let_go()
    reservation, kept.held = kept.held, None
    if reservation is not None:
        reservation.release()
