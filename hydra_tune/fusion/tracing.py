"""The forward and backward of a stacked shard as one flat graph, without autograd and `torch.vmap` at run time.

For small models most of a step is not arithmetic but what comes before it: dispatch through `torch.vmap`, and autograd's
bookkeeping. Both are the same at each step, so they are done once, on tensors without bytes, and what operators they come to is
kept. Random numbers are arguments of the graph: what a shard draws is noted, and drawn before it runs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hydra_tune.devices.own_generator import own_generator
from hydra_tune.fusion.drawing import GroupGenerator, Noise, draw_all, given, noting
from hydra_tune.fusion.flat import Layout, runs
from hydra_tune.fusion.tidying import call_directly, overwrite, tidy, write_in_place
from hydra_tune.shard.compute import Gradients, Operands
from hydra_tune.shard.placing import placed
from hydra_tune.shard.quiet import quiet_fakes

_MAX_REMEMBERED = 64
_Layouts = list[tuple[Layout, list[int]]]
"""Layouts, each with the numbers of the tensors that lie so."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A shard's forward and backward, traced.

    Attributes:
        module: takes the operands, the noise and room for gradients, returns the losses and the gradients of `trained`.
        trained: the parameters that have gradients.
        places: of them among the shard's parameters and buffers.
        written: which of their gradients are made where there is room for them.
        noise: what it draws.
        loss: the name of the losses.
        pure: the module before it was given room: it makes all gradients itself.
        place: the device that it was traced for; it runs on all of that kind.
        forward: runs the module.
        code: compiled code of that, which runs in the place of the module, if there is any.
    """

    module: fx.GraphModule
    trained: tuple[str, ...]
    places: tuple[int, ...]
    written: tuple[int, ...]
    noise: tuple[Noise, ...]
    loss: str
    pure: fx.GraphModule
    place: torch.device
    forward: Callable[..., Sequence[Tensor]]
    code: Callable[..., Sequence[Tensor]] | None = None
    _layouts: dict[tuple[int, ...], _Layouts] = field(default_factory=dict)

    def draw(self, device: torch.device) -> list[Tensor]:
        """The random numbers of one run."""
        if not self.noise:
            return []
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return draw_all(self.noise, group, device)

    def run(self, operands: Operands, noise: Sequence[Tensor] | None = None, *, is_laid_out: bool = False) -> Gradients:
        """The gradients of each member's loss, and the losses.

        Args:
            operands: of the shard.
            noise: its random numbers, if they have been drawn.
            is_laid_out: whether gradients are to lie one behind the other as the parameters do, so that they can be taken
                as one (`flat.py`); none then shares its bytes with anything else.
        """
        if noise is None:
            noise = self.draw(operands.all[0].device)
        with torch.no_grad():
            room = self._room([operands.state[place] for place in self.places], is_laid_out=is_laid_out)
            if self.code is not None:
                written: tuple[int, ...] = ()
                losses, *gradients = self.code(*operands.all, *noise)
            else:
                written = self.written
                losses, *gradients = self.forward(*operands.all, *noise, *[room[index] for index in written])
            if is_laid_out and len(written) < len(room):
                rest = [index for index in range(len(room)) if index not in written]
                torch._foreach_copy_([room[index] for index in rest], [gradients[index] for index in rest])
                gradients = [room[index] for index in range(len(room))]
        return Gradients(
            live_in={}, parameters=dict(zip(self.trained, gradients, strict=True)), outputs={self.loss: losses}
        )

    def _room(self, parameters: Sequence[Tensor], *, is_laid_out: bool) -> Mapping[int, Tensor]:
        """Where gradients are to be, by place in `trained`."""
        if not is_laid_out:
            return {index: torch.empty_like(parameters[index]) for index in self.written}
        addresses = tuple([parameter.data_ptr() for parameter in parameters])
        layouts = self._layouts.get(addresses)
        if layouts is None:
            if len(self._layouts) >= _MAX_REMEMBERED:
                self._layouts.clear()
            layouts = self._layouts[addresses] = _layouts(parameters)
        return {
            index: part
            for layout, indices in layouts
            for index, part in zip(indices, layout.room(parameters[indices[0]]).parts, strict=True)
        }


def _layouts(parameters: Sequence[Tensor]) -> _Layouts:
    """How parameters lie, those of each dtype for themselves."""
    kinds: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
    for index, parameter in enumerate(parameters):
        kinds.setdefault(parameter.dtype, []).append((parameter, index))
    return [(layout, [index for _, index in run]) for kind in kinds.values() for layout, run in runs(kind)]


def traced_forward(run: Any, operands: Operands) -> fx.GraphModule:
    """Trace a shard that draws nothing, without gradients.

    Args:
        run: the stacked shard.
        operands: tensors of the sizes to trace for.

    Returns:
        What takes the operands and returns the shard's outputs.
    """
    with torch.no_grad():
        module = make_fx(run, tracing_mode="fake")(*(tensor.detach() for tensor in operands.all))
    tidy(module)
    return module


def traced(
    run: Any,
    names: Sequence[str],
    operands: Operands,
    trains: Sequence[bool],
    loss: str,
    count: int,
    *,
    draws: bool = True,
    accumulate: int = 1,
    place: torch.device | None = None,
) -> Traced | None:
    """Trace a shard that makes nothing but the loss; None where it draws numbers that depend on values.

    Args:
        run: the stacked shard.
        names: of its parameters and buffers.
        operands: tensors of the sizes to trace for; only their geometry counts.
        trains: for each of the names, whether its gradient is wanted.
        loss: what the shard's output is called.
        count: members.
        draws: whether it may draw random numbers.
        accumulate: batches of a step, by which each loss is divided.
        place: the device to trace for, unless it is the operands': kernels, and what there is a choice of, are its own.
    """
    mode = FakeTensorMode()
    fakes = [_fake(mode, tensor.detach(), place) for tensor in operands.all]
    drawn: Sequence[Noise] | None = _drawn(run, fakes, mode) if draws else ()
    if drawn is None:
        return None
    with mode:
        noise = [n.room(count, fakes[0].device) for n in drawn]
    trained_at = [index for index, one in enumerate(trains) if one]
    reached: list[int] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        own = list(tensors[: len(fakes)])
        for index in trained_at:
            own[index] = own[index].detach().requires_grad_()
        with given(tensors[len(fakes) :]), torch.enable_grad():
            (losses,) = run(*own)
            wanted = [own[index] for index in trained_at]
            begins = torch.full_like(losses, 1 / accumulate)
            gradients = torch.autograd.grad(losses, wanted, begins, allow_unused=True)
        reached[:] = [index for index, g in zip(trained_at, gradients, strict=True) if g is not None]
        return [losses, *(gradient for gradient in gradients if gradient is not None)]

    with quiet_fakes():  # what an operator cannot do for all members at once is done for one after the other
        module = make_fx(joint, tracing_mode="fake")(*fakes, *noise)
    tidy(module)
    pure = fx.GraphModule(module, copy.deepcopy(module.graph))
    written = write_in_place(module, first=1)
    overwrite(module)
    call_directly(module)
    with mode, torch.no_grad():  # once, so that what does not run is not taken for a trace
        module(*fakes, *noise, *[torch.empty_like(fakes[reached[index]]) for index in written])
    trained = tuple(names[place] for place in reached)
    home = fakes[0].device
    forward = placed(module, home=home)
    return Traced(module, trained, tuple(reached), written, tuple(drawn), loss, pure, home, forward)


def _fake(mode: FakeTensorMode, tensor: Tensor, place: torch.device | None) -> Tensor:
    """A tensor like another one, without bytes."""
    if place is None or place == tensor.device:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


def _drawn(run: Any, fakes: Sequence[Tensor], mode: FakeTensorMode) -> Sequence[Noise] | None:
    """What a shard draws; None where that depends on values."""
    with mode, torch.no_grad(), noting() as noted:
        run(*fakes)
    return noted.found if noted.is_hoistable else None
