"""Run of a step's graph, node by node, for its profile (Algorithm A).

Each feature map goes to the host after its last use in the forward, and comes back before its first use in the backward,
so a step can be profiled whose maps do not fit the device together. A map in the result of a node with several tensors
is copied both ways, and stays on the device as well.

`profiler.py` runs a graph several times here, and reads the seconds of nodes and copies from a `ProfilingClock`;
`output_layouts.py` looks at the layouts of results. The module must not know plans or budgets: every feature map makes
the same way to the host and back.

Note: random numbers. A profile moves no trial's stream. Made-up numbers come from a generator of their own. Draws come
from states that belong to no trial; on a GPU, each draw sets the GPU's default generator to such a state, in turn with
trials (`CudaGenerator.in_turn`).

Note: locks. The module takes only the lock of `in_turn`. The callers of `profiler.py` borrow the device, share `GATE`
(`shard/capture/capture_lock.py`) and compute with a single thread while a graph is profiled; `output_layouts.py` shares
`GATE` itself.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from hydra_tune.batched.batched_random import GroupGenerator, TurnTakingGenerator
from hydra_tune.devices.cuda import CudaGenerator
from hydra_tune.errors import UnfusableError
from hydra_tune.planner.ir.aliasing import Layout, is_like, layout_of
from hydra_tune.planner.ir.planner_ops import draw, view_of
from hydra_tune.planner.ir.step_profile import FeatureMap
from hydra_tune.planner.run.filling import filled, located
from hydra_tune.planner.trace.step_graph import StepGraph
from hydra_tune.shard.capture.graph_device import moved


class ProfilingClock(Protocol):
    """Times actions on a device."""

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action, record how long the device takes, and return the result."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds recorded since the last call, by name."""

    def whole(self) -> float | None:
        """Return the host's time in seconds; None where nodes are timed on the device."""

    def peak_beyond(self, made_bytes: int) -> int:
        """Return the peak bytes of the last action, beyond the memory in use before and `made_bytes`."""


@dataclass(frozen=True, slots=True)
class _ProfiledCall:
    """A node, prepared to run.

    Attributes:
        place: of the node's value.
        ends: places of values that nobody needs afterwards.
        back: feature maps that come back before the node.
        away: feature maps that go to the host after the node.
    """

    node: fx.Node
    place: int
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    ends: tuple[int, ...]
    back: tuple[str, ...]
    away: tuple[str, ...]


class ProfilingInterpreter:
    """Runs a graph on made-up numbers."""

    def __init__(
        self, step: StepGraph, maps: Mapping[str, FeatureMap], device: torch.device, clock: ProfilingClock
    ) -> None:
        self._step, self._device, self._clock = step, device, clock
        self._host: dict[str, Tensor] = {}
        # Stacked tensors begin with the dimension of the members.
        count = next(iter(step.geometry.values())).size(0)
        self._generators = _generators(step, device, count)
        self._nodes = [node for node in step.graph.nodes if node.op != "output"]
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._given = {
            self._places[node]: made_up(step.geometry[node.name], device)
            if node.op == "placeholder"
            else getattr(step.owner, str(node.target)).to(device)
            for node in self._nodes
            if node.op in ("placeholder", "get_attr")
        }
        self._holders = {
            storage: [node for node in step.ops[: step.num_forward] if storage in step.seen.storages[node.name]]
            for storage in maps
        }
        self._backward = set(step.ops[step.num_forward :])
        self._values: list[Any] = []
        self._calls = self._made(maps)

    def once(self, workspace: dict[str, int]) -> None:
        """Run the graph node by node, and raise the bytes of `workspace` where a node needs more.

        Raises:
            UnfusableError: an operator fails on made-up numbers, or a result lies in memory otherwise, or has another
                size, than the step says.
        """
        self._begin()
        sizes, makes = self._step.seen.sizes, self._step.seen.makes
        with torch.no_grad():
            for call in self._calls:
                name = call.node.name
                for storage in call.back:
                    self._back(storage)
                self._values[call.place] = self._clock.timed(name, partial(self._call, call))
                if not is_like(layout_of(self._values[call.place]), self._step.seen.layouts[name]):
                    self._refuse(call)
                made_bytes = sum(sizes[storage] for storage in makes[name])
                workspace[name] = max(workspace.get(name, 0), self._clock.peak_beyond(made_bytes))
                for storage in call.away:
                    self._away(storage)
                for place in call.ends:
                    self._values[place] = None
        self._values.clear()

    def otherwise_laid(self) -> dict[str, Layout]:
        """Run the graph, and return the layouts of the nodes whose results lie otherwise than traced.

        The run ends before such a result would go to the host, because its bytes could not be read by the traced
        strides.

        Raises:
            UnfusableError: an operator fails on made-up numbers, a view lies otherwise than traced before any other
                result does, or a feature map has another size than traced.
        """
        self._begin()
        deviations: dict[str, Layout] = {}
        with torch.no_grad():
            for call in self._calls:
                for storage in call.back:
                    self._back(storage)
                value = self._values[call.place] = self._call(call)
                if not is_like(layout := layout_of(value), self._step.seen.layouts[call.node.name]):
                    # A view makes no storage, so no corrected layout can describe this one, unless an earlier result
                    # explains it.
                    if not deviations and not self._step.seen.makes[call.node.name]:
                        self._refuse(call)
                    deviations[call.node.name] = layout
                if any(node.name in deviations for storage in call.away for node in self._holders[storage]):
                    break
                for storage in call.away:
                    self._away(storage)
                for place in call.ends:
                    self._values[place] = None
        self._values.clear()
        return {name: layout for name, layout in deviations.items() if self._step.seen.makes[name]}

    def _refuse(self, call: _ProfiledCall) -> NoReturn:
        value, traced = self._values[call.place], self._step.seen.layouts[call.node.name]
        raise UnfusableError(
            f"{call.node.target} gives strides {layout_of(value)} on {self._device}, and {traced} when it is traced without "
            "bytes; it runs unplanned; composed of simpler operators, the step may be planned"
        )

    def whole(self) -> float:
        """Run the graph, and return the host's seconds between copies; the clock must be the host's."""
        self._begin()
        seconds = 0.0
        with torch.no_grad():
            begin = self._read()
            for call in self._calls:
                if call.back:
                    seconds += self._read() - begin
                    for storage in call.back:
                        self._back(storage)
                    begin = self._read()
                self._values[call.place] = self._call(call)
                if call.away:
                    seconds += self._read() - begin
                    for storage in call.away:
                        self._away(storage)
                    begin = self._read()
                for place in call.ends:
                    self._values[place] = None
        seconds += self._read() - begin
        self._values.clear()
        return seconds

    def _read(self) -> float:
        seconds = self._clock.whole()
        assert seconds is not None, "asked before"
        return seconds

    def _begin(self) -> None:
        # Arguments and constants are on the device between runs, all other values only during a run.
        self._values = [None] * len(self._nodes)
        for place, value in self._given.items():
            self._values[place] = value

    def _call(self, call: _ProfiledCall) -> Any:
        """Run a node as an interpreter does; the handler costs no time where nothing is raised."""
        try:
            return call.run(*filled(call.args, self._values), **filled(call.kwargs, self._values))
        # A full device is no fault of the operator.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnfusableError(
                f"its operator {call.node.target} fails on the numbers that profiles are made with "
                f"({type(error).__name__}: {error}); it runs unplanned"
            ) from error

    def _made(self, maps: Mapping[str, FeatureMap]) -> list[_ProfiledCall]:
        step, forward = self._step, self._step.num_forward
        last_users = {argument: node for node in self._nodes for argument in (node, *node.all_input_nodes)}
        ends: dict[fx.Node, list[int]] = {}
        for argument, node in last_users.items():
            # Arguments and constants stay for the next run.
            if argument.op == "call_function":
                ends.setdefault(node, []).append(self._places[argument])
        return [
            _ProfiledCall(
                node=node,
                place=self._places[node],
                run=self._meaning(node),
                args=located(moved(tuple(node.args), self._device), self._places),
                kwargs=located(moved(dict(node.kwargs), self._device), self._places),
                ends=tuple(ends.get(node, ())),
                back=tuple(name for name, feature_map in maps.items() if feature_map.first_backward == rank - forward),
                away=tuple(name for name, feature_map in maps.items() if feature_map.last_forward == rank),
            )
            for rank, node in enumerate(step.ops)
        ]

    def _meaning(self, node: fx.Node) -> Callable[..., Any]:
        if node.target is draw:
            return self._draw
        assert callable(node.target), "an operator"
        return node.target

    def _draw(self, number: int) -> Tensor:
        """Draw as members do: on the device, in its memory and with its kernels."""
        turn = CudaGenerator(self._device).in_turn() if self._device.type == "cuda" else nullcontext()
        with turn:
            return self._step.noise[number].draw(self._generators, self._device)

    def _away(self, storage: str) -> None:
        """Copy a feature map to the host (stage 3)."""
        size = self._step.seen.sizes[storage]
        # Every tensor on the storage shows all its bytes. The size tells the storage among several results of a node.
        tensor = next(
            (
                leaf
                for node in self._holders[storage]
                for leaf in tree_leaves(self._values[self._places[node]])
                if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() == size
            ),
            None,
        )
        if tensor is None:  # batch norm of numbers in low precision on a CPU
            raise UnfusableError(
                f"{self._holders[storage][0].target} gives tensors of other sizes on {self._device} than it does when it is "
                "traced without bytes; it runs unplanned"
            )
        if storage not in self._host:
            # Pinned as in planned runs, or the measured copies would be slower than the planned.
            pins = self._device.type == "cuda"
            self._host[storage] = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        host = self._host[storage]
        self._clock.timed(
            f"out {storage}", lambda: host.copy_(view_of(tensor, torch.uint8, [size], [1], 0), non_blocking=True)
        )
        # Drop the tensors, so that the device frees the storage. Several tensors of a single node cannot be viewed
        # anew, and stay.
        for node in self._holders[storage]:
            if node.name in self._step.seen.places:
                self._values[self._places[node]] = None

    def _back(self, storage: str) -> None:
        """Copy a feature map back to the device (stage 1)."""
        size, host = self._step.seen.sizes[storage], self._host[storage]
        flat: Tensor = self._clock.timed(
            f"in {storage}",
            lambda: torch.empty(size, dtype=torch.uint8, device=self._device).copy_(host, non_blocking=True),
        )
        for node in self._holders[storage]:
            place = self._step.seen.places.get(node.name)
            is_needed = not set(node.users).isdisjoint(self._backward)
            if is_needed and place is not None and place.storage == storage:
                view = view_of(flat, place.dtype, list(place.size), list(place.stride), place.offset)
                self._values[self._places[node]] = view


def _generators(step: StepGraph, device: torch.device, count: int) -> GroupGenerator:
    """Return generators that belong to no trial; draws with a probability for each member get made-up probabilities."""
    probabilities = {noise_draw.slot: [0.5] * count for noise_draw in step.noise if noise_draw.slot is not None}
    if device.type != "cuda":
        return GroupGenerator([torch.Generator(device) for _ in range(count)], probabilities=probabilities)
    states = [torch.Generator(device).get_state() for _ in range(count)]
    return TurnTakingGenerator(states, CudaGenerator(device), [True] * count, probabilities)


def made_up(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of some geometry with small numbers that hardly any operator rejects.

    Numbers other than floating-point numbers are 0: an integer 0 is a valid row of every table.
    """
    tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    if not like.is_floating_point():
        return tensor.zero_()
    # Not from the default generator: on a GPU another thread may have set that to the state of a trial's stream.
    return tensor.uniform_(0.25, 0.75, generator=torch.Generator(device))
