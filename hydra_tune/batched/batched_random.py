"""Random numbers of stacked members: every member draws from its own generator.

`GroupStreams` (`fusion/group/group_rng.py`) makes the generator of all members for each unit that draws; a stacked
graph (`fusion/batching/batched_graph.py`, `fusion/batching/rnn_rules.py`, `fusion/batching/per_member_fallback.py`) draws
node by node, a traced step (`joint_graph.py`) before its run, and a planned step (`fusion/runtime/step_arguments.py`)
noise by noise. `planner/profile/profiling_interpreter.py` draws from generators of its own, and `joint_graph.py` and
`planner/trace/unsupported_ops.py` note draws without drawing (`noting`). The module must not know groups, trials or plans.

Note: bits. A member must draw as many numbers as in an unfused run, in the same order and memory layout. A resting member
draws nothing and gets zeros.

Note: on a GPU. Operators such as dropout draw from the GPU's default generator and accept no other, and dropout has a
kernel of its own (`torch.native_dropout`). While a member draws, the default generator is therefore set to
the state of the member's stream (`TurnTakingGenerator`). Dropout masks are drawn by the dropout kernel, in separate
memory for each member, so a member gets the same masks as in an unfused run. Fused attention draws inside its kernels,
and cuDNN's recurrent layers keep a separate generator in cuDNN. In both cases a group draws with torch's plain kernels
from the members' own streams, and the numbers differ from the numbers of the fused kernels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from hydra_tune.devices.device import RandomGenerator
from hydra_tune.devices.own_generator import drawing_from, own_generator

_HOISTABLE = frozenset(
    # Random primitives whose numbers depend only on a shape and plain values.
    [torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p]
)

_LOOKING = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001


class GroupGenerator(torch.Generator):
    """The generators of a group's members as a single generator, for `drawing_from`.

    Args:
        active: whether each member draws; by default all members draw.
        probabilities: dropout probabilities by node name, where members have different probabilities.
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
        """Create a generator for identification only; no operator draws from it directly."""
        generator = super().__new__(cls)
        generator.members = list(members)
        generator.active = [True] * len(generator.members) if active is None else list(active)
        generator.probabilities = {} if probabilities is None else probabilities
        return generator

    def get_state(self) -> Tensor:
        """Return the states, a row for each member."""
        return torch.stack([member.get_state() for member in self.members])

    def set_state(self, state: Tensor) -> "GroupGenerator":
        """Restore the states of the members that draw."""
        # Another member, here or in another group, may draw from the generator that a vacant slot holds.
        for member, row, active in zip(self.members, state, self.active, strict=True):
            if active:
                member.set_state(row.clone())  # torch ignores a view's offset, so copy the row
        return self

    def turn(self, index: int) -> AbstractContextManager[None]:
        """Let operators without an explicit generator draw from a member's generator inside the context."""
        return drawing_from(self.members[index])


class TurnTakingGenerator(GroupGenerator):
    """The streams of a group's members on a GPU, taking turns with the GPU's default generator.

    Args:
        states: state of every stream, in the format of the default generator.
        default: the GPU's default generator; no other thread may use the generator meanwhile.
        active, probabilities: as of `GroupGenerator`.
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
        generator = super().__new__(cls, (), active, probabilities)
        generator.states, generator._default = list(states), default
        return generator

    @override
    def get_state(self) -> Tensor:
        return torch.stack(self.states)

    @override
    def set_state(self, state: Tensor) -> "TurnTakingGenerator":
        self.states = [row.clone() for row in state]
        return self

    @contextmanager
    @override
    def turn(self, index: int) -> Iterator[None]:
        self._default.set_state(self.states[index])
        try:
            yield
        finally:
            self.states[index] = self._default.get_state()


@dataclass(frozen=True, slots=True)
class HoistedDraw:
    """Random numbers of a graph that can be drawn before the graph runs.

    Attributes:
        shape, strides, dtype: of a member's numbers, laid out without gaps.
        slot: name of the dropout node, if members have different probabilities; the masks are then scaled.
        is_dropout: whether the numbers are a dropout mask, for which GPUs have a separate kernel.
    """

    target: Any
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    slot: str | None = None
    is_dropout: bool = False

    def room(self, count: int, device: torch.device) -> Tensor:
        """Allocate room for the numbers of `count` members, each laid out like a single member's numbers."""
        strides = (self.shape.numel(), *self.strides)
        return torch.empty_strided((count, *self.shape), strides, dtype=self.dtype, device=device)

    def draw(self, group: GroupGenerator, device: torch.device) -> Tensor:
        """Draw the numbers of all members, stacked along a first dimension."""
        if isinstance(group, TurnTakingGenerator):
            (numbers,) = _in_turns([self], group, device)
            return numbers
        if self.slot is not None:
            return self._scaled(group, group.probabilities[self.slot], device)
        numbers = self.room(len(group.members), device).zero_()
        # Calls name a generator, so skip the dispatch key that would look for one (`devices/own_generator.py`).
        with torch._C._ExcludeDispatchKeyGuard(_LOOKING):  # noqa: SLF001
            for row, generator, active in zip(numbers.unbind(), group.members, group.active, strict=True):
                if active:
                    row.bernoulli_(*self.arguments, generator=generator)
        return numbers

    def _scaled(self, group: GroupGenerator, probabilities: Sequence[float], device: torch.device) -> Tensor:
        """Draw scaled masks; like dropout, draw nothing for the probabilities 0 and 1."""
        numbers = self.room(len(group.members), device)
        for row, generator, active, p in zip(numbers, group.members, group.active, probabilities, strict=True):
            if not active or p in (0.0, 1.0):
                row.fill_(0.0 if p == 1.0 or not active else 1.0)
            else:
                row.bernoulli_(1 - p, generator=generator).div_(1 - p)
        return numbers

    def fill(self, row: Tensor, group: GroupGenerator, index: int) -> None:
        """Draw a member's numbers into `row`, during the member's turn."""
        if self.slot is None:
            keep_probability: float = self.arguments[0]
            row.copy_(dropout_mask(row, keep_probability)) if self.is_dropout else row.bernoulli_(keep_probability)
            return
        # As in `_scaled`: a draw would advance the member's stream past its state in an unfused run.
        p = group.probabilities[self.slot][index]
        if p in (0.0, 1.0):
            row.fill_(1.0 - p)
        else:
            row.copy_(dropout_mask(row, 1 - p) if self.is_dropout else torch.empty_like(row).bernoulli_(1 - p)).div_(
                1 - p
            )


def dropout_mask(like: Tensor, kept: float) -> Tensor:
    """Draw a mask of zeros and ones with torch's dropout kernel.

    Args:
        like: gives shape, dtype and strides.
        kept: probability of keeping an element.
    """
    # Separate memory, because the kernel visits elements in an order that depends on the layout.
    whole = torch.ones_like(like)
    return torch.native_dropout(whole, 1 - kept, True)[1].to(like.dtype)


def draw_all(noise: Sequence[HoistedDraw], group: GroupGenerator, device: torch.device) -> list[Tensor]:
    """Draw the numbers of every entry of `noise`, in order."""
    if isinstance(group, TurnTakingGenerator):
        return _in_turns(noise, group, device)
    return [draw.draw(group, device) for draw in noise]


def _in_turns(noise: Sequence[HoistedDraw], group: TurnTakingGenerator, device: torch.device) -> list[Tensor]:
    rooms = [draw.room(len(group.active), device).zero_() for draw in noise]
    for index, active in enumerate(group.active):
        if active:
            # A single turn exchanges the generator's state once per member instead
            # of once per draw. Draws inside a turn keep the order of an unfused run.
            with group.turn(index):
                for draw, room in zip(noise, rooms, strict=True):
                    draw.fill(room[index], group, index)
    return rooms


@dataclass(slots=True)
class _DrawTape:
    """Draws recorded by `noting`, or the numbers that `given` supplies."""

    found: list[HoistedDraw]
    given: Iterator[Tensor] | None
    is_hoistable: bool = True
    refused: list[str] = field(default_factory=list)


_NOTED: ContextVar[_DrawTape | None] = ContextVar("noise of a traced run", default=None)


@contextmanager
def noting() -> Iterator[_DrawTape]:
    """Record the draws of a run, on fake tensors, without drawing."""
    tape = _DrawTape([], None)
    token = _NOTED.set(tape)
    try:
        yield tape
    finally:
        _NOTED.reset(token)


@contextmanager
def given(noise: Sequence[Tensor]) -> Iterator[None]:
    """Supply a run with the given numbers, in order, instead of drawing."""
    token = _NOTED.set(_DrawTape([], iter(noise)))
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
    """Run a random primitive for each member, and stack the results.

    Args:
        target: the primitive; accepts a generator.
        arguments: positional arguments.
        keywords: keyword arguments, except the generator.
        is_stacked: for every entry of `arguments`, whether its tensors have the members in front.
        count: number of members.
        strides: strides of the first argument in an unfused run, without gaps, which decide the order of the draws; by
            default the present strides.
        is_dropout: as of `HoistedDraw`.
    """
    tape = _NOTED.get()
    if tape is not None:
        return _noted(tape, target, arguments, is_stacked, count, strides, is_dropout=is_dropout)
    group = _group()
    # A GPU's dropout kernel draws other numbers than `bernoulli_` does, and an unfused run uses the dropout kernel.
    if isinstance(group, TurnTakingGenerator) and is_dropout:
        like = arguments[0][0] if is_stacked[0] else arguments[0]
        member_strides = like.stride() if strides is None else strides
        return _noise(target, like.shape, member_strides, like.dtype, arguments[1:], is_dropout=True).draw(
            group, like.device
        )
    rows: list[Tensor | None] = []
    for index, active in enumerate(group.active):
        if not active:
            rows.append(None)
            continue
        member_arguments = [
            _of_member(a, index) if stacked else a for a, stacked in zip(arguments, is_stacked, strict=True)
        ]
        # An in-place primitive must not write into the stacked argument. `randn_like` fills its result in the order in
        # which the argument lies, and stacked members lie otherwise than a member alone.
        lies_elsewhere = strides is not None and member_arguments[0].stride() != tuple(strides)
        if lies_elsewhere or _overwrites_first(target):
            member_arguments[0] = (
                member_arguments[0].clone() if strides is None else _lying(member_arguments[0], strides)
            )
        if isinstance(group, TurnTakingGenerator):
            with group.turn(index):
                rows.append(target(*member_arguments, **keywords))
        else:
            rows.append(target(*member_arguments, **keywords, generator=group.members[index]))
    active_row = next(row for row in rows if row is not None)
    return torch.stack([torch.zeros_like(active_row) if row is None else row for row in rows])


def masks(slot: str, like: Tensor, strides: Sequence[int] | None = None, *, is_dropout: bool = True) -> Tensor:
    """Draw the scaled masks of a dropout node, with a separate probability for each member.

    Args:
        slot: name of the node.
        like: a stacked tensor with the shape of the masks.
        strides: strides of the masks in an unfused run; by default those of a row of `like`.
        is_dropout: as of `HoistedDraw`.
    """
    target = torch.ops.aten.bernoulli_.float
    member_strides = like.stride()[1:] if strides is None else strides
    tape = _NOTED.get()
    if tape is None:
        draw = _noise(target, like.shape[1:], member_strides, like.dtype, (), slot, is_dropout=is_dropout)
        return draw.draw(_group(), like.device)
    if tape.given is not None:
        return next(tape.given)
    tape.found.append(_noise(target, like.shape[1:], member_strides, like.dtype, (), slot, is_dropout=is_dropout))
    return torch.ones_like(like)


def for_each(run: Callable[[int], Any], count: int) -> list[Any]:
    """Run a function that draws random numbers, by the index of each member; resting members get zeros."""
    tape = _NOTED.get()
    if tape is not None:
        tape.is_hoistable = False
        return [run(index) for index in range(count)]
    group = _group()
    rows: list[Any] = [None] * count
    for index, active in enumerate(group.active):
        if active:
            with group.turn(index):
                rows[index] = run(index)
    active_row = next(row for row, active in zip(rows, group.active, strict=True) if active)
    # Fresh zeros, not the member's own result: gradients of a resting slot must not flow into an active member.
    return [
        row
        if active
        else tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, active_row)
        for row, active in zip(rows, group.active, strict=True)
    ]


def _group() -> GroupGenerator:
    group = own_generator()
    assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
    return group


def _noted(
    noted: _DrawTape,
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
    member_tensor = like[0] if is_stacked[0] else like
    # Such numbers may depend on values inside the graph, so the numbers
    # cannot be drawn before the graph runs, and the shard stays untraced.
    if target not in _HOISTABLE:
        noted.is_hoistable = False
        noted.refused.append(str(target))
    member_strides = member_tensor.stride() if strides is None else strides
    noted.found.append(
        _noise(target, member_tensor.shape, member_strides, member_tensor.dtype, arguments[1:], is_dropout=is_dropout)
    )
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
) -> HoistedDraw:
    # `empty_like` closes gaps but keeps the order of dimensions,
    # and the order decides which element gets which number.
    dense = torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    return HoistedDraw(target, shape, dense.stride(), dtype, arguments, slot, is_dropout)


def _of_member(value: Any, index: int) -> Any:
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, value)


def _overwrites_first(target: Any) -> bool:
    alias_info = target._schema.arguments[0].alias_info  # noqa: SLF001
    return alias_info is not None and bool(alias_info.is_write)


def _lying(value: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
