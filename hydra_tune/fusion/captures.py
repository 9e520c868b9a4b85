"""The traced step of a group as a CUDA graph: recorded once, and replayed for as long as the group's state stays where it is.

Note: what is in a graph. Forward and backward, which read parameters and buffers where they lie, and copies of the batch, the
constants and the random numbers, which are made before each replay. Random numbers are drawn before, as for any traced step,
so no generator is part of a graph. The optimizer's step is not in it: rates and step counts are read at each step, as ever, and
nothing of a schedule can be baked in. Gradients and losses are copied out: memory of a graph is written by the next replay.

Note: what moves. A shard that was spilled comes back to another address, which a graph would not know: it is recorded anew
once the state has stayed for a step, and given up where that happens too often (`Course`).

Note: memory. A graph keeps what its step computes with, for itself alone, from one replay to the next. That is on its
device's ledger, as room that is let go of before any block is spilled (`Pager.hold`); what is let go of is recorded anew in
the same way.

Note: what is compared. A recorded step is replayed beside the step as it was traced, from the same state; one that fails, or
gives something else, is not used, and the log says why.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from hydra_tune.fusion.compiling import difference
from hydra_tune.fusion.plan import StackedComputing
from hydra_tune.fusion.tracing import Traced
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Held
from hydra_tune.shard.capture import describe
from hydra_tune.shard.compute import Gradients, Incoming, Operands, Tape
from hydra_tune.shard.plan import Plan
from hydra_tune.shard.split import ShardGraph
from hydra_tune.shard.steps import Objective, loss_itself

_LOGGER = logging.getLogger("hydra_tune.fusion")
_STEADY_STEPS = 2  # for which the state has to have been where it is, before a step is recorded
_MOST_RECORDINGS = 8  # of one kind of step, until it is given up
_NO_ROOM = "its device has no room for what a graph keeps for itself"
_MOST_KINDS = 4  # of steps that are kept recorded; each has memory of its own


class Recording(Protocol):
    """A step that can be replayed.

    Attributes:
        outputs: tensors that a replay writes.
        nbytes: of memory that it keeps for itself.
    """

    outputs: Sequence[Tensor]
    nbytes: int

    def replay(self) -> None:
        """Run it again, on what is now where its operands were."""

    def drop(self) -> None:
        """Give its memory back."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        """Record what a function has the device do; it may be run several times, and what it computes is not used."""


class Course:
    """When a step is recorded, when it is replayed, and when it runs as it is. Looks at addresses alone."""

    def __init__(self) -> None:
        self.why = ""
        self._last: Hashable = None
        self._stayed = 0
        self._recorded: Hashable = None
        self._count = 0

    def next(self, addresses: Hashable) -> str:
        """What is to be done with the next step.

        Args:
            addresses: of what it reads where it lies.

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
        """The last step was recorded."""
        self._recorded = self._last
        self._count += 1

    def forget(self) -> None:
        """What was recorded is gone."""
        self._recorded = None

    def give_up(self, why: str) -> None:
        """It is not recorded any more."""
        self.why = why
        self._recorded = None
        _LOGGER.warning("a group's step is not replayed as a CUDA graph: %s", why)


@dataclass(slots=True)
class _Kept:
    """A kind of step: what it was traced to, and its recording, if there is one."""

    trace: Traced
    course: Course = field(default_factory=Course)
    recording: Recording | None = None
    given: Sequence[Tensor] = ()
    held: Held | None = None

    def let_go(self) -> None:
        """Give up the recording; it may be made again. Its room is given back by whoever asks for that."""
        self.course.forget()
        recording, self.recording, self.given = self.recording, None, ()
        if recording is not None:
            recording.drop()


class Captures:
    """The recorded steps of one group.

    Args:
        recorder: of its devices.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()
        self._plans: dict[int, tuple[Plan, Plan]] = {}

    def of(self, plan: Plan) -> Plan:
        """A group's plan that runs recorded where it can; the same each time."""
        found = self._plans.get(id(plan))
        if found is None:
            if len(self._plans) >= _MOST_KINDS:
                self._plans.clear()
            assert isinstance(plan.computing, StackedComputing), "not a group's plan"
            found = self._plans[id(plan)] = plan, replace(plan, computing=CapturedComputing(plan, self))
        return found[1]

    def close(self) -> None:
        """Give up all recordings and their room."""
        for kept in self._kept.values():
            _part(kept)
        self._kept.clear()
        self._plans.clear()

    def run(
        self, trace: Traced, shard: ShardGraph, operands: Operands, room_bytes: int, lease: Lease | None
    ) -> Gradients:
        """One step.

        Args:
            trace: of its forward and backward.
            shard: what was traced.
            operands: of it.
            room_bytes: that it computes with.
            lease: of the unit.
        """
        place = operands.state[0].device
        kept = self._kept_for(trace, str(place) if lease is None else lease.place)
        noise = trace.draw(place)
        what = kept.course.next(tuple([tensor.data_ptr() for tensor in operands.state]))
        if what == "replay" and kept.recording is not None:
            return _replayed(kept, kept.recording, [*operands.constants, *operands.inputs, *noise])
        if kept.recording is not None and what != "replay":
            _part(kept)  # its state has moved
        if what != "record" or lease is None:
            return trace.run(operands, noise)
        return self._recorded(kept, shard, operands, noise, room_bytes, lease)

    def _kept_for(self, trace: Traced, place: str) -> _Kept:
        key = (id(trace), place)
        if key not in self._kept:
            while len(self._kept) >= _MOST_KINDS:
                _part(self._kept.popitem(last=False)[1])
            self._kept[key] = _Kept(trace)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _recorded(
        self, kept: _Kept, shard: ShardGraph, operands: Operands, noise: list[Tensor], room_bytes: int, lease: Lease
    ) -> Gradients:
        """Run a step as it is, and record it beside."""
        given = [*operands.constants, *operands.inputs, *noise]
        own_bytes = 2 * sum(tensor.nbytes for tensor in given)
        kept.held = lease.hold(room_bytes + own_bytes, kept.let_go)
        if kept.held is None:
            kept.course.give_up(_NO_ROOM)
            return kept.trace.run(operands, noise)
        written = [operands.state[shard.state.index(name)].detach() for name in shard.written_state]
        before = [tensor.clone() for tensor in written]
        originals = [tensor.clone() for tensor in given]
        kept.given = [tensor.clone() for tensor in given]
        why = ""
        try:
            kept.recording = self._recorder.record(lambda: _flat(kept.trace, operands, kept.given))
            needed_bytes = kept.recording.nbytes + own_bytes
            if needed_bytes > kept.held.nbytes:  # an allocator gives a graph's pool whole segments
                kept.held.release()
                kept.held = lease.hold(needed_bytes, kept.let_go)
                why = "" if kept.held is not None else f"{_NO_ROOM}: {needed_bytes} bytes"
        except Exception as error:  # noqa: BLE001 - many things cannot be captured, and the step can do without
            why = f"it cannot be recorded: {describe(error)}"
        _put(written, before)
        if kept.recording is None or why:
            _part(kept)
            kept.course.give_up(why)
            return kept.trace.run(operands, noise)
        replayed = _outputs(kept.trace, _replayed(kept, kept.recording, originals))
        overwritten = [tensor.clone() for tensor in written]
        _put(written, before)
        made = kept.trace.run(operands, noise)
        why = difference(_outputs(kept.trace, made), replayed) or difference(written, overwritten)
        if why:
            _part(kept)
            kept.course.give_up(why)
        else:
            kept.course.recorded()
            _LOGGER.info("the step of a group of %d is replayed as a CUDA graph", operands.state[0].size(0))
        return made


@dataclass(slots=True)
class CapturedComputing:
    """Runs a group's plan, steps of training recorded where they can be.

    Attributes:
        plan: the group's.
        captures: its recordings.
        lease: of the unit that runs.
    """

    plan: Plan
    captures: Captures
    lease: Lease | None = None

    @property
    def stacked(self) -> StackedComputing:
        """What runs where nothing is recorded."""
        assert isinstance(self.plan.computing, StackedComputing), "not a group's plan"
        return self.plan.computing

    def forward(
        self, shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `compute.forward`."""
        return self.stacked.forward(shard, operands, needs_gradient)

    def taped_forward(
        self, shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], Tape]:
        """As `compute.taped_forward`."""
        return self.stacked.taped_forward(shard, operands, needs_gradient)

    def backward(
        self,
        shard: ShardGraph,
        operands: Operands,
        *,
        needs_gradient: frozenset[str],
        incoming: Incoming,
        objective: Objective = loss_itself,
    ) -> Gradients:
        """As `compute.backward`."""
        trace = self.stacked.trace_on(shard, operands)
        if trace is None or trace.code is not None:
            return self.stacked.backward(
                shard, operands, needs_gradient=needs_gradient, incoming=incoming, objective=objective
            )
        (cost,) = [one.cost for one in self.plan.shards]
        room_bytes = max(cost.forward_workspace, cost.backward_workspace) + cost.trained_bytes
        return self.captures.run(trace, shard, operands, room_bytes, self.lease)


def _flat(trace: Traced, operands: Operands, given: Sequence[Tensor]) -> list[Tensor]:
    """What a step makes of these constants, inputs and noise."""
    first, last = len(operands.constants), len(operands.constants) + len(operands.inputs)
    own = replace(operands, constants=given[:first], inputs=given[first:last])
    return _outputs(trace, trace.run(own, list(given[last:])))


def _outputs(trace: Traced, made: Gradients) -> list[Tensor]:
    return [made.outputs[trace.loss], *made.parameters.values()]


def _replayed(kept: _Kept, recording: Recording, given: Sequence[Tensor]) -> Gradients:
    """Replay a step on these constants, inputs and noise; what it makes is copied out."""
    _put(kept.given, given)
    recording.replay()
    found = [torch.empty_like(tensor) for tensor in recording.outputs]
    _put(found, recording.outputs)
    losses, *gradients = found
    named: Mapping[str, Tensor] = dict(zip(kept.trace.trained, gradients, strict=True))
    return Gradients(live_in={}, parameters=dict(named), outputs={kept.trace.loss: losses})


def _put(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _part(kept: _Kept) -> None:
    """Give up a recording and its room."""
    kept.let_go()
    held, kept.held = kept.held, None
    if held is not None:
        held.release()
