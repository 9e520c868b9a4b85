"""The random streams of a group: those of its members, each of which draws its own numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.fusion.drawing import GroupGenerator
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

    def replace(self, index: int, member: RandomStreams) -> None:
        """A place is another member's from now on."""
        self._members[index] = member

    @property
    def _group(self) -> GroupGenerator:
        return GroupGenerator([member.generator for member in self._members], self.active, self.probabilities)

    def mark(self) -> tuple[Tensor, Tensor | None]:
        """Where they all stand, for `go_back`."""
        return self._group.get_state(), None

    def go_back(self, mark: tuple[Tensor, Tensor | None]) -> None:
        """Have them stand where they stood."""
        self._group.set_state(mark[0])

    def drawing(self, device: Device, *, keep: bool) -> AbstractContextManager[None]:
        """As of `RandomStreams`, on a device that shares the host's generator."""
        assert device.shares_generator, "groups that draw run on CPU devices"
        return self._drawing(keep=keep)

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
