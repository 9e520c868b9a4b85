"""`GroupStreams`: the random streams of a group, composed of the members' own streams.

`SlotTable` (`slot_table.py`) makes `GroupStreams` when a group begins or changes its size, and for the parts of an
evaluation; each unit of the group that draws random numbers (`group_step.py`, `multi_step_unit.py`,
`fusion/runtime/paired_unit.py`) enters `drawing`. `GroupTrial` (`group_trial.py`) has members' own optimizers
(`batched/per_member_optimizer.py`) step within `updating` and `of_member`.

Note: a slot that is not active must draw nothing and write no state back. Streams belong to the members, and a vacant slot
holds the streams of a member that may draw in another slot or elsewhere (`vacant` in `slot.py`).

Note: locks. On a GPU, a unit holds the turn of the device's generator while members draw, and takes the turn before the
capture gate.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from hydra_tune.batched.batched_random import GroupGenerator, TurnTakingGenerator
from hydra_tune.devices.device import Device, RandomGenerator
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.train.rng.rng_streams import RandomStreams, drawing_on_host


class GroupStreams(RandomStreams):
    """Random streams that a group's units draw from.

    Attributes:
        probabilities: as of `GroupGenerator`, for the running plan.
    """

    def __init__(self, members: Sequence[RandomStreams]) -> None:
        super().__init__(0)
        self._members = list(members)
        self.active = [True] * len(self._members)
        self.probabilities: Mapping[str, Sequence[float]] = {}
        self._turns: TurnTakingGenerator | None = None  # set while members draw on a GPU

    def replace(self, index: int, member: RandomStreams) -> None:
        """Give a slot to another member's stream."""
        self._members[index] = member

    @property
    def _group(self) -> GroupGenerator:
        return GroupGenerator([member.generator for member in self._members], self.active, self.probabilities)

    def mark(self) -> Any:
        """Return the present states of all streams, for `go_back`; callable on a GPU during draws too."""
        turns = None if self._turns is None else self._turns.get_state()
        return [member.mark() for member in self._members], turns

    def go_back(self, mark: Any) -> None:
        """Restore the states of the active members' streams from a mark."""
        marks, turns = mark
        for member, member_mark, active in zip(self._members, marks, self.active, strict=True):
            if active:
                member.go_back(member_mark)
        if self._turns is not None and turns is not None:  # otherwise leaving the context would keep the draws
            self._turns.set_state(turns)

    def generator_on(self, device: Device) -> RandomGenerator:
        """Return the generator for the start of a recompute, while members draw on a device."""
        return device.generator if self._turns is None else _GroupGeneratorAdapter(self._turns)

    @override
    def drawing(self, device: Device | None, *, keep: bool) -> AbstractContextManager[None]:
        # CPU operators accept the members' generators. A GPU's operators draw from its default generator
        # (`batched_random.py`).
        if device is None or device.shares_generator:
            return drawing_on_host(self._group, keep=keep)
        return self._drawing_in_turns(device, keep=keep)

    @override
    @contextmanager
    def updating(self, device: Device | None) -> Iterator[None]:
        """Let the members' own optimizers draw from the members' streams, each within `of_member`."""
        # A round on a GPU may be drawing already.
        with nullcontext() if self._turns is not None else self.drawing(device, keep=True):
            yield

    @contextmanager
    def of_member(self, index: int) -> Iterator[None]:
        """Make the streams of the thread a member's, for the optimizer of the member within `updating`."""
        group = self._group if self._turns is None else self._turns
        with self._members[index].of_python(), group.turn(index):
            yield

    @contextmanager
    def _drawing_in_turns(self, device: Device, *, keep: bool) -> Iterator[None]:
        """Let members draw in turn on a GPU.

        The context holds the GPU's default generator, so no other thread draws from the generator meanwhile.
        """
        states = [member.gpu_state(device) for member in self._members]
        with device.generator.in_turn():
            group = self._turns = TurnTakingGenerator(states, device.generator, self.active, self.probabilities)
            try:
                with drawing_from(group):
                    yield
            finally:
                self._turns = None
                if keep:
                    for member, state, active in zip(self._members, group.states, group.active, strict=True):
                        if active:
                            member.keep_gpu_state(state)


@dataclass(frozen=True, slots=True)
class _GroupGeneratorAdapter:
    """The members' streams in the form of a device's generator, to save states and restore them."""

    group: TurnTakingGenerator

    def get_state(self) -> Tensor:
        """Return all states."""
        return self.group.get_state()

    def set_state(self, state: Tensor) -> None:
        """Set all states."""
        self.group.set_state(state)

    def in_turn(self) -> AbstractContextManager[object]:
        """Return an empty context: the members already hold the generator."""
        return nullcontext()
