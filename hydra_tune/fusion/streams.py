"""The random streams of a group: those of its members, each of which draws its own numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hydra_tune.devices.device import Device, RandomGenerator
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.fusion.drawing import GroupGenerator, TurnsGenerator
from hydra_tune.train.streams import RandomStreams


class GroupStreams(RandomStreams):
    """What the units of a group draw from.

    Args:
        members: the members' own streams.

    Attributes:
        active: whether each of them draws.
        probabilities: as of `GroupGenerator`, for the plan that runs.
    """

    def __init__(self, members: Sequence[RandomStreams]) -> None:
        super().__init__(0)
        self._members = list(members)
        self.active = [True] * len(self._members)
        self.probabilities: Mapping[str, Sequence[float]] = {}
        self._turns: TurnsGenerator | None = None  # while they draw on a GPU

    def replace(self, index: int, member: RandomStreams) -> None:
        """A place is another member's from now on."""
        self._members[index] = member

    @property
    def _group(self) -> GroupGenerator:
        return GroupGenerator([member.generator for member in self._members], self.active, self.probabilities)

    def mark(self) -> Any:
        """Where they all stand, for `go_back`; on a GPU also while they draw."""
        turns = None if self._turns is None else self._turns.get_state()
        return [member.mark() for member in self._members], turns

    def go_back(self, mark: Any) -> None:
        """Have them stand where they stood."""
        marks, turns = mark
        for member, own in zip(self._members, marks, strict=True):
            member.go_back(own)
        if self._turns is not None and turns is not None:  # or what they have drawn would be kept where this ends
            self._turns.set_state(turns)

    def generator_on(self, device: Device) -> RandomGenerator:
        """What a unit's recompute is to start from, while they draw on a device."""
        return device.generator if self._turns is None else _Rewound(self._turns)

    def drawing(self, device: Device | None, *, keep: bool) -> AbstractContextManager[None]:
        """As of `RandomStreams`."""
        if device is None or device.shares_generator:
            return self._drawing(keep=keep)
        return self._drawing_in_turns(device, keep=keep)

    @contextmanager
    def _drawing(self, *, keep: bool) -> Iterator[None]:
        group = self._group
        before = None if keep else group.get_state()
        with drawing_from(group):
            try:
                yield
            finally:
                if before is not None:
                    group.set_state(before)

    @contextmanager
    def _drawing_in_turns(self, device: Device, *, keep: bool) -> Iterator[None]:
        """On a GPU, whose default generator is nobody else's meanwhile."""
        states = [member.gpu_state(device) for member in self._members]
        with device.generator.in_turn():
            group = self._turns = TurnsGenerator(states, device.generator, self.active, self.probabilities)
            try:
                with drawing_from(group):
                    yield
            finally:
                self._turns = None
                if keep:
                    for member, state in zip(self._members, group.states, strict=True):
                        member.keep_gpu_state(state)


@dataclass(frozen=True, slots=True)
class _Rewound:
    """The members' streams as a device's generator, to note where they stand and have them stand there again."""

    group: TurnsGenerator

    def get_state(self) -> Tensor:
        """All states."""
        return self.group.get_state()

    def set_state(self, state: Tensor) -> None:
        """Set them."""
        self.group.set_state(state)

    def in_turn(self) -> AbstractContextManager[object]:
        """It is theirs already."""
        return nullcontext()
