"""Trace forward and backward of a stacked shard to a flat graph, free of autograd and `torch.vmap` at run time.

In small models most of a step's time is overhead: dispatch through `torch.vmap`, and bookkeeping of autograd. Tracing
pays for the overhead once, on fake tensors without memory. Random numbers become arguments of the graph: tracing notes
the draws of a shard, and the numbers are drawn before each run. `fusion/compile/batched_plan.py` traces when a group
meets a kind of batch for the first time (`fusion/compile/batched_plan_cache.py`), and its `StackedPlanExecutor` and rounds
(`fusion/group/multi_step_unit.py`) run the trace. With `fusion_compile`, `fusion/compile/torch_compile.py` compiles a trace,
or `fusion/compile/cuda_graph_steps.py` records a trace as a CUDA graph. `planner/trace/step_graph.py` traces each step to
be planned. The module must not know groups, trials or plans.

Note: a trace bakes in the number of members, the sizes of the batch, the divisor of the losses, and the kind of device, but
holds no tensor of a group. The caller holds the capture gate alone (`shard/capture/capture_lock.py`), because tracing
changes state of the whole process.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hydra_tune.batched.batched_random import GroupGenerator, HoistedDraw, draw_all, given, noting
from hydra_tune.batched.flat_tensors import FlatLayout, runs
from hydra_tune.batched.graph_cleanup import call_directly, overwrite, tidy, write_in_place
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.errors import UnfusableError
from hydra_tune.shard.capture.export_output import quiet_fakes
from hydra_tune.shard.capture.graph_device import placed
from hydra_tune.shard.execute.compute import ShardGradients, ShardOperands

_MAX_REMEMBERED = 64
_RECORDING = (torch.ops.aten.mkldnn_rnn_layer.default,)  # keep what their backward needs only in autograd's grad mode
_Layouts = list[tuple[FlatLayout, list[int]]]
"""Layouts, each with the indices of the tensors of this layout."""


@dataclass(frozen=True, slots=True)
class JointTrace:
    """The traced forward and backward of a shard.

    Attributes:
        trained: names of the parameters with gradients.
        places: positions of `trained` among the shard's parameters and buffers.
        written: indices of gradients written directly into the given room.
        noise: the random numbers that the shard draws.
        is_scaled: whether the trace takes the members' loss scales, behind the random numbers.
        pure: module of the trace that allocates all gradients itself, and takes no room for gradients.
        place: the device of the trace; the trace runs on every device of the same kind.
        forward: takes operands, noise and room for gradients; returns the losses and the gradients of `trained`.
        code: compiled form of `pure`, run instead of the module; None without a compiler.
    """

    trained: tuple[str, ...]
    places: tuple[int, ...]
    written: tuple[int, ...]
    noise: tuple[HoistedDraw, ...]
    loss: str
    pure: fx.GraphModule
    place: torch.device
    forward: Callable[..., Sequence[Tensor]]
    code: Callable[..., Sequence[Tensor]] | None = None
    is_scaled: bool = False
    _layouts: dict[tuple[int, ...], _Layouts] = field(default_factory=dict)

    def draw(self, device: torch.device, scales: Tensor | None = None) -> list[Tensor]:
        """Draw the random numbers of a run; behind them come the members' loss scales, if the losses are scaled."""
        behind = [scales.to(device)] if self.is_scaled and scales is not None else []
        if not self.noise:
            return behind
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return [*draw_all(self.noise, group, device), *behind]

    def room_for_noise(self, count: int, device: torch.device) -> list[Tensor]:
        """Allocate room for the results of `draw`, for `count` members."""
        scales = [torch.empty(count, device=device)] if self.is_scaled else []
        return [*(noise_draw.room(count, device) for noise_draw in self.noise), *scales]

    def run(
        self, operands: ShardOperands, noise: Sequence[Tensor] | None = None, *, is_laid_out: bool = False
    ) -> ShardGradients:
        """Return the gradients of every member's loss, and the losses.

        Args:
            operands: operands of the shard.
            noise: result of `draw`, if already drawn.
            is_laid_out: whether to lay gradients out contiguously in the order of the parameters, so that the optimizer
                can treat them as a single tensor (`flat_tensors.py`); such gradients share no bytes with other tensors.
        """
        if noise is None:
            noise = self.draw(operands.all[0].device)
        with torch.no_grad():
            room = self.room(operands, is_laid_out=is_laid_out)
            if self.code is not None:
                # Compiled code allocates its own outputs.
                written: tuple[int, ...] = ()
                losses, *gradients = self.code(*operands.all, *noise)
            else:
                written = self.written
                losses, *gradients = self.forward(*operands.all, *noise, *[room[index] for index in written])
            if is_laid_out and len(written) < len(room):
                # Operators without an output argument have allocated their gradients: copy these into the room.
                missing_indices = [index for index in range(len(room)) if index not in written]
                torch._foreach_copy_(
                    [room[index] for index in missing_indices], [gradients[index] for index in missing_indices]
                )
                gradients = [room[index] for index in range(len(room))]
        return ShardGradients(
            live_in={}, parameters=dict(zip(self.trained, gradients, strict=True)), outputs={self.loss: losses}
        )

    def room(self, operands: ShardOperands, *, is_laid_out: bool) -> Mapping[int, Tensor]:
        """Return empty gradients to write into, by index in `trained`: those of `written`, or all if laid out as of `run`."""
        parameters = [operands.state[place] for place in self.places]
        if not is_laid_out:
            return {index: torch.empty_like(parameters[index]) for index in self.written}
        # Blocks move when they are spilled and loaded, and the neighbours
        # of a parameter change with them, so layouts are known by address.
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
    kinds: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
    for index, parameter in enumerate(parameters):
        kinds.setdefault(parameter.dtype, []).append((parameter, index))
    return [(layout, [index for _, index in run]) for kind in kinds.values() for layout, run in runs(kind)]


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """The traced forward of a shard without gradients.

    Attributes:
        place: as of `JointTrace`.
        run: takes the operands; returns the shard's outputs.
    """

    place: torch.device
    run: Callable[..., Sequence[Tensor]]


def traced_forward(run: Any, operands: ShardOperands, place: torch.device | None = None) -> ForwardTrace:
    """Trace the forward of a stacked shard that draws no random numbers; arguments as of `traced`."""
    mode = FakeTensorMode()
    fakes = [_fake(mode, tensor.detach(), place) for tensor in operands.all]
    with torch.no_grad():
        module = make_fx(run, tracing_mode="fake")(*fakes)
    tidy(module)
    home = fakes[0].device
    return ForwardTrace(home, placed(module, home=home))


def traced(
    run: Any,
    names: Sequence[str],
    operands: ShardOperands,
    trains: Sequence[bool],
    loss: str,
    count: int,
    *,
    draws: bool = True,
    divisor: int = 1,
    place: torch.device | None = None,
    is_scaled: bool = False,
) -> JointTrace | None:
    """Trace a shard whose only output is the loss; return None if the shard has draws that cannot be made ahead (`noting`).

    Args:
        run: the stacked shard.
        names: names of its parameters and buffers.
        operands: tensors of the sizes to trace for; only the geometry counts.
        trains: for every name, whether the gradient is wanted.
        loss: name of the shard's output.
        count: number of members.
        draws: whether the shard may draw random numbers.
        divisor: divisor of every loss.
        place: the device to trace for, by default the operands' device; decompositions and kernels depend on the
            device.
        is_scaled: whether each member's loss is multiplied by a scale of its own.

    Raises:
        UnfusableError: the shard has a kernel that no trace can call.
    """
    mode = FakeTensorMode()
    fakes = [_fake(mode, tensor.detach(), place) for tensor in operands.all]
    hoisted_draws: Sequence[HoistedDraw] | None = _drawn(run, fakes, mode) if draws else ()
    if hoisted_draws is None:
        return None
    with mode:
        noise = [n.room(count, fakes[0].device) for n in hoisted_draws]
        noise += [torch.empty(count, device=fakes[0].device)] if is_scaled else []
    trained_at = [index for index, is_trained in enumerate(trains) if is_trained]
    reached_places: list[int] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        """Return the members' losses, then the gradient of each trained operand that the losses reach."""
        arguments = list(tensors[: len(fakes)])
        for index in trained_at:
            arguments[index] = arguments[index].detach().requires_grad_()
        with given(tensors[len(fakes) :]), torch.enable_grad():
            (losses,) = run(*arguments)
            trained_tensors = [arguments[index] for index in trained_at]
            scales = tensors[-1].to(losses.dtype) if is_scaled else None
            # As the backward of `objective` begins.
            loss_gradients = torch.full_like(losses, 1 / divisor) if scales is None else scales / divisor
            # No operator mixes members, so the gradient of the sum of all losses holds every member's own gradient.
            gradients = torch.autograd.grad(losses, trained_tensors, loss_gradients, allow_unused=True)
        reached_places[:] = [index for index, g in zip(trained_at, gradients, strict=True) if g is not None]
        return [losses, *(gradient for gradient in gradients if gradient is not None)]

    with quiet_fakes():  # failed attempts at batching are expected here: `StackedGraph` falls back to single members
        module = make_fx(joint, tracing_mode="fake")(*fakes, *noise)
    _check_kernels(module)
    trained = tuple(names[place] for place in reached_places)
    simplified = _simplified(module, mode, [*fakes, *noise], [fakes[place] for place in reached_places])
    return replace(
        simplified,
        trained=trained,
        places=tuple(reached_places),
        noise=tuple(hoisted_draws),
        loss=loss,
        is_scaled=is_scaled,
    )


def _check_kernels(module: fx.GraphModule) -> None:
    """Refuse a trace with a kernel that works only while autograd records; a trace runs without autograd."""
    for kernel in _RECORDING:
        if module.graph.find_nodes(op="call_function", target=kernel):
            raise UnfusableError(
                f"its kernel {kernel} keeps what its backward needs only where autograd records, and a trace runs without"
            )


def _simplified(
    module: fx.GraphModule, mode: FakeTensorMode, fakes: Sequence[Tensor], trained: Sequence[Tensor]
) -> JointTrace:
    """Return a trace that lacks what only the shard knows; `fakes` are the module's arguments."""
    tidy(module)
    # `compiled_trace` compiles the functional form, which allocates its own outputs.
    pure = fx.GraphModule(module, copy.deepcopy(module.graph))
    written = write_in_place(module, first=1)
    overwrite(module)
    # Last, because the other passes recognize operators by their overloads.
    call_directly(module)
    with mode, torch.no_grad():  # run once, so that a trace that cannot run is rejected now
        module(*fakes, *[torch.empty_like(trained[index]) for index in written])
    home = fakes[0].device
    forward = placed(module, home=home)
    return JointTrace(trained=(), places=(), written=written, noise=(), loss="", pure=pure, place=home, forward=forward)


def _fake(mode: FakeTensorMode, tensor: Tensor, place: torch.device | None) -> Tensor:
    if place is None or place == tensor.device:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


def _drawn(run: Any, fakes: Sequence[Tensor], mode: FakeTensorMode) -> Sequence[HoistedDraw] | None:
    """Return the draws that a shard makes, in order; None if a draw cannot be made before the graph runs."""
    with mode, torch.no_grad(), noting() as tape:
        run(*fakes)
    return tape.found if tape.is_hoistable else None
