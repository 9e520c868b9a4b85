"""Random numbers of stacked members: each is drawn from its own member's generator.

Note: on a GPU. Most operators there draw from the GPU's default generator and take no other, dropout among them, which has a
kernel of its own (`torch.native_dropout`). So the default generator stands where a member's stream stands while the member's
numbers are drawn (`TurnsGenerator`), and dropout's masks are drawn by that kernel, each in memory of its own as one member's
would be: they are the masks that the member would draw alone, whatever the group's size. Fused attention draws within its
kernels, and cuDNN's recurrent layers keep a generator of cuDNN's: of these a group has its members' own numbers, drawn as
torch's plain kernels do, but not those that the fused kernels would draw.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hydra_tune.devices.device import RandomGenerator
from hydra_tune.devices.own_generator import drawing_from, own_generator

_HOISTABLE = frozenset(
    # Random primitives whose numbers depend on nothing but a shape and plain values.
    [torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p]
)

_LOOKING = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001


class GroupGenerator(torch.Generator):
    """The generators of a group's members as one, for `drawing_from`.

    Args:
        members: one generator each.
        active: whether each of them draws; the others' numbers are zeros. All, unless given.
        probabilities: of dropout, by the name of the node that drops, where each member has one of its own.
    """

    members: list[torch.Generator]
    active: list[bool]
    probabilities: Mapping[str, Sequence[float]]

    def __new__(
        cls,
        members: Sequence[torch.Generator],
        active: Sequence[bool] | None = None,
        probabilities: Mapping[str, Sequence[float]] | None = None,
    ) -> Self:
        """A generator of its own that nobody draws from."""
        made = super().__new__(cls)
        made.members = list(members)
        made.active = [True] * len(made.members) if active is None else list(active)
        made.probabilities = {} if probabilities is None else probabilities
        return made

    def get_state(self) -> Tensor:
        """All states, one a row."""
        return torch.stack([member.get_state() for member in self.members])

    def set_state(self, state: Tensor) -> "GroupGenerator":
        """Have all of them stand where they stood."""
        for member, row in zip(self.members, state, strict=True):
            member.set_state(row.clone())  # torch reads past the start of a view
        return self

    def turn(self, index: int) -> AbstractContextManager[None]:
        """Meanwhile what draws without being given a generator draws a member's numbers."""
        return drawing_from(self.members[index])


class TurnsGenerator(GroupGenerator):
    """The streams of a group's members on a GPU, whose default generator they have in turn.

    Args:
        states: where each stream stands, as the default generator gives it.
        default: the GPU's; for nobody else meanwhile.
        active, probabilities: as of `GroupGenerator`.

    Attributes:
        states: where they stand now.
    """

    states: list[Tensor]
    _default: RandomGenerator

    def __new__(
        cls,
        states: Sequence[Tensor],
        default: RandomGenerator,
        active: Sequence[bool],
        probabilities: Mapping[str, Sequence[float]],
    ) -> Self:
        """As of `GroupGenerator`, without generators."""
        made = super().__new__(cls, (), active, probabilities)
        made.states, made._default = list(states), default
        return made

    def get_state(self) -> Tensor:
        """As of `GroupGenerator`."""
        return torch.stack(self.states)

    def set_state(self, state: Tensor) -> "TurnsGenerator":
        """As of `GroupGenerator`."""
        self.states = [row.clone() for row in state]
        return self

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """As of `GroupGenerator`."""
        self._default.set_state(self.states[index])
        try:
            yield
        finally:
            self.states[index] = self._default.get_state()


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers that a graph draws, as far as they can be drawn before it runs.

    Attributes:
        target: the primitive that draws them.
        shape, strides, dtype: of the numbers of one member, as they lie without gaps.
        arguments: of the primitive beside them.
        slot: the node that drops with these numbers, if each member has a probability of its own: they are scaled then.
        is_dropout: whether they are the mask of dropout, for which GPUs have a kernel of its own.
    """

    target: Any
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    slot: str | None = None
    is_dropout: bool = False

    def room(self, count: int, device: torch.device) -> Tensor:
        """Where the numbers of so many members go, each of which lie in memory as those of one do."""
        strides = (self.shape.numel(), *self.strides)
        return torch.empty_strided((count, *self.shape), strides, dtype=self.dtype, device=device)

    def draw(self, group: GroupGenerator, device: torch.device) -> Tensor:
        """The numbers of all members, one behind the other along a first dimension."""
        if isinstance(group, TurnsGenerator):
            (made,) = _in_turns([self], group, device)
            return made
        if self.slot is not None:
            return self._scaled(group, group.probabilities[self.slot], device)
        made = self.room(len(group.members), device).zero_()
        # Each has its generator, so that what looks for one (`devices/own_generator.py`) is passed by.
        with torch._C._ExcludeDispatchKeyGuard(_LOOKING):  # noqa: SLF001
            for row, generator, active in zip(made.unbind(), group.members, group.active, strict=True):
                if active:
                    row.bernoulli_(*self.arguments, generator=generator)
        return made

    def _scaled(self, group: GroupGenerator, probabilities: Sequence[float], device: torch.device) -> Tensor:
        """Masks, as dropout multiplies with them; without drawing where a probability leaves no choice, as dropout does."""
        made = self.room(len(group.members), device)
        for row, generator, active, p in zip(made, group.members, group.active, probabilities, strict=True):
            if not active or p in (0.0, 1.0):
                row.fill_(0.0 if p == 1.0 or not active else 1.0)
            else:
                row.bernoulli_(1 - p, generator=generator).div_(1 - p)
        return made

    def fill(self, row: Tensor, group: GroupGenerator, index: int) -> None:
        """Draw one member's numbers, in its turn, to where they go."""
        if self.slot is None:
            kept: float = self.arguments[0]
            row.copy_(dropout_mask(row, kept)) if self.is_dropout else row.bernoulli_(kept)
            return
        p = group.probabilities[self.slot][index]
        if p in (0.0, 1.0):
            row.fill_(1.0 - p)
        else:
            row.copy_(dropout_mask(row, 1 - p) if self.is_dropout else torch.empty_like(row).bernoulli_(1 - p)).div_(
                1 - p
            )


def dropout_mask(like: Tensor, kept: float) -> Tensor:
    """The mask that dropout draws where it has a kernel of its own, for a tensor that lies so and holds nothing else.

    Args:
        like: of the shape, dtype and strides, whatever is in it.
        kept: the probability of keeping an element.

    Returns:
        Zeros and ones like it.
    """
    whole = torch.ones_like(
        like
    )  # in memory of its own: the kernel takes elements in an order that depends on how they lie
    return torch.native_dropout(whole, 1 - kept, True)[1].to(like.dtype)


def draw_all(noise: Sequence[Noise], group: GroupGenerator, device: torch.device) -> list[Tensor]:
    """The numbers of all members, of each of these in their order."""
    if isinstance(group, TurnsGenerator):
        return _in_turns(noise, group, device)
    return [one.draw(group, device) for one in noise]


def _in_turns(noise: Sequence[Noise], group: TurnsGenerator, device: torch.device) -> list[Tensor]:
    """Each member draws all of its own in one turn."""
    made = [one.room(len(group.active), device).zero_() for one in noise]
    for index, active in enumerate(group.active):
        if active:
            with group.turn(index):
                for one, room in zip(noise, made, strict=True):
                    one.fill(room[index], group, index)
    return made


@dataclass(slots=True)
class _Noted:
    """What a run draws: noted the first time, given the next."""

    found: list[Noise]
    given: Iterator[Tensor] | None
    is_hoistable: bool = True
    refused: list[str] = field(default_factory=list)


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
    target: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    is_stacked: Sequence[bool],
    count: int,
    strides: Sequence[int] | None = None,
    *,
    is_dropout: bool = False,
) -> Tensor:
    """What a random primitive makes for each member, stacked.

    Args:
        target: the primitive, which takes a generator.
        arguments: its own; tensors among them have the members in front where `is_stacked` says so.
        keywords: its own, but for the generator.
        is_stacked: of each of `arguments`.
        count: members.
        strides: of what it makes for a member alone, as whose numbers are drawn in the order in which they lie there; those of
            the argument unless given.
        is_dropout: as of `Noise`.
    """
    noted = _NOTED.get()
    if noted is not None:
        return _noted(noted, target, arguments, is_stacked, count, strides, is_dropout=is_dropout)
    group = _group()
    if isinstance(group, TurnsGenerator) and is_dropout:
        one = arguments[0][0] if is_stacked[0] else arguments[0]
        lies = one.stride() if strides is None else strides
        return _noise(target, one.shape, lies, one.dtype, arguments[1:], is_dropout=True).draw(group, one.device)
    rows: list[Tensor | None] = []
    for index, active in enumerate(group.active):
        if not active:
            rows.append(None)
            continue
        own = [_of_member(a, index) if stacked else a for a, stacked in zip(arguments, is_stacked, strict=True)]
        if _overwrites_first(target):  # what is overwritten is each member's own
            own[0] = own[0].clone() if strides is None else _lying(own[0], strides)
        if isinstance(group, TurnsGenerator):
            with group.turn(index):
                rows.append(target(*own, **keywords))
        else:
            rows.append(target(*own, **keywords, generator=group.members[index]))
    some = next(row for row in rows if row is not None)
    return torch.stack([torch.zeros_like(some) if row is None else row for row in rows])


def masks(slot: str, like: Tensor, strides: Sequence[int] | None = None, *, is_dropout: bool = True) -> Tensor:
    """What a node that drops multiplies with, scaled, each member's with its own probability.

    Args:
        slot: the node's name.
        like: stacked, of the shape of the masks.
        strides: as of `drawn`.
        is_dropout: as of `Noise`.
    """
    target = torch.ops.aten.bernoulli_.float
    lies = like.stride()[1:] if strides is None else strides
    noted = _NOTED.get()
    if noted is None:
        made = _noise(target, like.shape[1:], lies, like.dtype, (), slot, is_dropout=is_dropout)
        return made.draw(_group(), like.device)
    if noted.given is not None:
        return next(noted.given)
    noted.found.append(_noise(target, like.shape[1:], lies, like.dtype, (), slot, is_dropout=is_dropout))
    return torch.ones_like(like)


def for_each(run: Callable[[int], Any], count: int) -> list[Any]:
    """Have each member run something that draws; those that rest have zeros.

    Args:
        run: takes a member's number.
        count: members.
    """
    noted = _NOTED.get()
    if noted is not None:
        noted.is_hoistable = False
        return [run(index) for index in range(count)]
    group = _group()
    rows: list[Any] = [None] * count
    for index, active in enumerate(group.active):
        if active:
            with group.turn(index):
                rows[index] = run(index)
    some = next(row for row, active in zip(rows, group.active, strict=True) if active)
    # Zeros of their own: what is made of them must not reach the gradients of the member that they are shaped as.
    return [
        row if active else tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, some)
        for row, active in zip(rows, group.active, strict=True)
    ]


def _group() -> GroupGenerator:
    group = own_generator()
    assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
    return group


def _noted(
    noted: _Noted,
    target: Any,
    arguments: tuple[Any, ...],
    is_stacked: Sequence[bool],
    count: int,
    strides: Sequence[int] | None,
    *,
    is_dropout: bool,
) -> Tensor:
    if noted.given is not None:
        return next(noted.given)
    like: Tensor = arguments[0]
    one = like[0] if is_stacked[0] else like
    if target not in _HOISTABLE:
        noted.is_hoistable = False
        noted.refused.append(str(target))
    lies = one.stride() if strides is None else strides
    noted.found.append(_noise(target, one.shape, lies, one.dtype, arguments[1:], is_dropout=is_dropout))
    return like if is_stacked[0] else like.expand(count, *like.shape).clone()


def _noise(
    target: Any,
    shape: torch.Size,
    strides: Sequence[int],
    dtype: torch.dtype,
    arguments: tuple[Any, ...],
    slot: str | None = None,
    *,
    is_dropout: bool = False,
) -> Noise:
    """What is drawn for a tensor that lies so, but for the gaps between its elements."""
    dense = torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    return Noise(target, shape, dense.stride(), dtype, arguments, slot, is_dropout)


def _of_member(value: Any, index: int) -> Any:
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, value)


def _overwrites_first(target: Any) -> bool:
    declared = target._schema.arguments[0].alias_info  # noqa: SLF001
    return declared is not None and bool(declared.is_write)


def _lying(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
