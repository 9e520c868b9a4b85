"""Random numbers of stacked members: each is drawn from its own member's generator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hydra_tune.devices.own_generator import own_generator

_HOISTABLE = frozenset(
    # Random primitives whose numbers depend on nothing but a shape and plain values.
    [torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p]
)


class GroupGenerator(torch.Generator):
    """The generators of a group's members as one, for `drawing_from`.

    Args:
        members: one generator each.
        active: whether each of them draws; the others' numbers are zeros. All, unless given.
    """

    members: list[torch.Generator]
    active: list[bool]

    def __new__(cls, members: Sequence[torch.Generator], active: Sequence[bool] | None = None) -> Self:
        """A generator of its own that nobody draws from."""
        made = super().__new__(cls)
        made.members = list(members)
        made.active = [True] * len(made.members) if active is None else list(active)
        return made

    def get_state(self) -> Tensor:
        """All states, one a row."""
        return torch.stack([member.get_state() for member in self.members])

    def set_state(self, state: Tensor) -> "GroupGenerator":
        """Have all of them stand where they stood."""
        for member, row in zip(self.members, state, strict=True):
            member.set_state(row.clone())  # torch reads past the start of a view
        return self


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers that a graph draws, as far as they can be drawn before it runs.

    Attributes:
        target: the primitive that draws them.
        like: a tensor of their shape and dtype for one member, without bytes.
        arguments: of the primitive beside that tensor.
    """

    target: Any
    like: Tensor
    arguments: tuple[Any, ...]

    def draw(self, group: GroupGenerator, device: torch.device) -> Tensor:
        """The numbers of all members, one behind the other along a first dimension."""
        made = torch.zeros((len(group.members), *self.like.shape), dtype=self.like.dtype, device=device)
        in_place = torch.ops.aten.bernoulli_.float
        for row, generator, active in zip(made, group.members, group.active, strict=True):
            if active:
                in_place(row, *self.arguments, generator=generator)
        return made


@dataclass(slots=True)
class _Noted:
    """What a run draws: noted the first time, given the next."""

    found: list[Noise]
    given: Iterator[Tensor] | None
    is_hoistable: bool = True


_NOTED: ContextVar[_Noted | None] = ContextVar("noise of a traced run", default=None)


@contextmanager
def noting() -> Iterator[_Noted]:
    """Note what a run on tensors without bytes draws; the numbers themselves are left as they are."""
    noted = _Noted([], None)
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


@contextmanager
def given(noise: Sequence[Tensor]) -> Iterator[None]:
    """Let a run take these numbers, in this order, in place of drawing them."""
    token = _NOTED.set(_Noted([], iter(noise)))
    try:
        yield
    finally:
        _NOTED.reset(token)


def drawn(
    target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], is_stacked: Sequence[bool], count: int
) -> Tensor:
    """What a random primitive makes for each member, stacked.

    Args:
        target: the primitive, which takes a generator.
        arguments: its own; tensors among them have the members in front where `is_stacked` says so.
        keywords: its own, but for the generator.
        is_stacked: of each of `arguments`.
        count: members.
    """
    noted = _NOTED.get()
    if noted is not None:
        return _noted(noted, target, arguments, is_stacked, count)
    group = own_generator()
    assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
    rows: list[Tensor | None] = []
    for index, generator in enumerate(group.members):
        own = [_of_member(a, index) if stacked else a for a, stacked in zip(arguments, is_stacked, strict=True)]
        if target._schema.is_mutable:  # noqa: SLF001 - what is overwritten is each member's own
            own[0] = own[0].clone()
        rows.append(target(*own, **keywords, generator=generator) if group.active[index] else None)
    some = next(row for row in rows if row is not None)
    return torch.stack([torch.zeros_like(some) if row is None else row for row in rows])


def _noted(noted: _Noted, target: Any, arguments: tuple[Any, ...], is_stacked: Sequence[bool], count: int) -> Tensor:
    if noted.given is not None:
        return next(noted.given)
    like: Tensor = arguments[0]
    one = like[0] if is_stacked[0] else like
    noted.is_hoistable = noted.is_hoistable and target in _HOISTABLE
    noted.found.append(Noise(target, torch.empty(one.shape, dtype=one.dtype, device="meta"), arguments[1:]))
    return like if is_stacked[0] else like.expand(count, *like.shape).clone()


def _of_member(value: Any, index: int) -> Any:
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, value)
