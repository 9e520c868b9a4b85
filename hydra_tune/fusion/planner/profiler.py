"""Algorithm A: how long each node of a step's graph takes, what memory it needs, and how long each feature map's copies take.

The graph is run node by node on numbers made up, with one warm-up and three runs, of which medians are taken. Every
feature map goes to the host after its last use in the forward and comes back before its first in the backward (stages
1 and 3), so that the graph of a sub-array which does not fit the device can be profiled; only what one node needs has
to fit beside the static tensors. On CUDA a node's time is that of its kernels: they are launched behind a pause that
is longer than the launching.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from hydra_tune.fusion.drawing import GroupGenerator
from hydra_tune.fusion.planner.arrays import Array, Op
from hydra_tune.fusion.planner.filling import filled, located
from hydra_tune.fusion.planner.nodes import draw, view_of
from hydra_tune.fusion.planner.step_graph import StepGraph
from hydra_tune.fusion.planner.storages import overwritten

WARM_UPS, RUNS = 1, 3


class Clock(Protocol):
    """Times what is done on a device."""

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """Do something and note how long the device takes; gives what it gives."""

    def seconds(self) -> dict[str, float]:
        """What was noted since the last call."""

    def peak_beyond(self, made_bytes: int) -> int:
        """Bytes that the last action needed at once beyond what it has left and so many."""


class CpuClock:
    """Host time.

    Args:
        now: seconds; the calling thread's own would leave out what other threads of the process do.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._found: dict[str, float] = {}

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """As of `Clock`."""
        begin = self._now()
        made = action()
        self._found[name] = self._now() - begin
        return made

    def seconds(self) -> dict[str, float]:
        """As of `Clock`."""
        found, self._found = self._found, {}
        return found

    def peak_beyond(self, made_bytes: int) -> int:
        """Nothing tells on a CPU."""
        del made_bytes
        return 0


class CudaClock:
    """Kernel time between events, behind a pause in which the host gets ahead.

    Args:
        device: the GPU.
    """

    _PAUSE_CYCLES = 400_000  # about 0.2 ms

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._before = 0

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """As of `Clock`."""
        begin, end = _event(), _event()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda._sleep(self._PAUSE_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's own tests use it so
        begin.record()
        made = action()
        end.record()
        self._events[name] = begin, end
        return made

    def seconds(self) -> dict[str, float]:
        """As of `Clock`."""
        torch.cuda.synchronize(self._device)
        found = {name: begin.elapsed_time(end) / 1000 for name, (begin, end) in self._events.items()}
        self._events = {}
        return found

    def peak_beyond(self, made_bytes: int) -> int:
        """As of `Clock`."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before - made_bytes)


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, by node or storage name.

    Attributes:
        seconds: of each node.
        workspace_bytes: of each node.
        out_seconds: of each feature map's copy to the host.
        in_seconds: of its copy back.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    out_seconds: dict[str, float] = field(default_factory=dict)
    in_seconds: dict[str, float] = field(default_factory=dict)


class Profiles:
    """Measures each graph once for each device.

    Args:
        clock: of a device; by its kind, unless given.
    """

    def __init__(self, clock: Callable[[torch.device], Clock] | None = None) -> None:
        self._clock = clock or (lambda device: CudaClock(device) if device.type == "cuda" else CpuClock())
        self._known: dict[tuple[str, str], Profile] = {}
        self._lock = threading.Lock()

    def array(self, name: str, step: StepGraph, device: torch.device) -> Array:
        """A sub-array as the planner knows it.

        Args:
            name: for people.
            step: its graph.
            device: where it runs.
        """
        with self._lock:
            key = _text_of(step), str(device)
            if key not in self._known:
                self._known[key] = measured(step, device, self._clock(device))
            return array_of(name, step, self._known[key])


def measured(step: StepGraph, device: torch.device, clock: Clock) -> Profile:
    """Profile a graph.

    Args:
        step: its graph.
        device: where it runs.
        clock: of that device.
    """
    run = _Run(step, device, clock)
    workspace: dict[str, int] = {}
    each: list[dict[str, float]] = []
    for number in range(WARM_UPS + RUNS):
        run.once(workspace)
        found = clock.seconds()
        if number >= WARM_UPS:
            each.append(found)
    medians = {name: statistics.median(one[name] for one in each) for name in each[0]}
    nodes = {node.name for node in step.ops}
    free = {node.name for node in step.ops if _is_view(step, node)} if device.type == "cuda" else set()
    return Profile(
        seconds={name: seconds for name, seconds in medians.items() if name in nodes - free},
        workspace_bytes=workspace,
        out_seconds={name[4:]: seconds for name, seconds in medians.items() if name.startswith("out ")},
        in_seconds={name[3:]: seconds for name, seconds in medians.items() if name.startswith("in ")},
    )


def array_of(name: str, step: StepGraph, profile: Profile) -> Array:
    """A sub-array as the planner knows it.

    Args:
        name: for people.
        step: its graph.
        profile: of it.
    """
    facts = step.seen
    ops = [
        Op(
            name=node.name,
            seconds=profile.seconds.get(node.name, 0.0),
            reads=facts.reads[node.name],
            makes=facts.makes[node.name],
            writes=facts.writes[node.name],
            repeated_writes=facts.writes[node.name] if overwritten(node)[1] else (),
            workspace_bytes=profile.workspace_bytes.get(node.name, 0),
            is_random=node.target is draw,
        )
        for node in step.ops
    ]
    made = {storage for op in ops for storage in op.makes}
    (output,) = (node for node in step.graph.nodes if node.op == "output")
    return Array(
        name=name,
        forward=tuple(ops[: step.num_forward]),
        backward=tuple(ops[step.num_forward :]),
        sizes={storage: size for storage, size in facts.sizes.items() if storage in made},
        static_bytes=sum(size for storage, size in facts.sizes.items() if storage not in made),
        out_seconds=profile.out_seconds,
        in_seconds=profile.in_seconds,
        results=frozenset(facts.storages[output.args[0][0].name]),
    )


def copied_at(array: Array, bytes_per_second: float, seconds: float = 0.0) -> Array:
    """The same sub-array on a link of another bandwidth.

    Args:
        array: of it.
        bytes_per_second: of the link, in each direction.
        seconds: what each copy takes beside.
    """
    times = {name: one.num_bytes / bytes_per_second + seconds for name, one in array.maps.items()}
    changed = {
        name: getattr(array, name) for name in ("name", "forward", "backward", "sizes", "static_bytes", "results")
    }
    return Array(**changed, out_seconds=times, in_seconds=times)


def made_up(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of some geometry with numbers that no operator minds: small ones, and the first of each table."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    return made.uniform_(0.25, 0.75) if like.is_floating_point() else made.zero_()


def _is_view(step: StepGraph, node: fx.Node) -> bool:
    """Whether a node makes and overwrites nothing, and so costs a GPU no time."""
    return not step.seen.makes[node.name] and not step.seen.writes[node.name]


def _text_of(step: StepGraph) -> str:
    shapes = {name: (one.dtype, tuple(one.shape), one.stride()) for name, one in step.geometry.items()}
    return f"{step.graph}{shapes}"


class _Run:
    def __init__(self, step: StepGraph, device: torch.device, clock: Clock) -> None:
        self._step, self._device, self._clock = step, device, clock
        self._array = array_of("", step, Profile())
        self._host: dict[str, Tensor] = {}
        self._last = {argument: node for node in step.graph.nodes for argument in (node, *node.all_input_nodes)}
        self._generators = GroupGenerator([torch.Generator(device) for _ in range(self._count())])
        self._arguments = {name: made_up(like, device) for name, like in step.geometry.items()}
        self._values: dict[fx.Node, Any] = {}

    def _count(self) -> int:
        return next(iter(self._step.geometry.values())).size(0)

    def once(self, workspace: dict[str, int]) -> None:
        """Run the graph; note the most that each node has needed."""
        rank = 0
        with torch.no_grad():
            for node in self._step.graph.nodes:
                if node.op == "placeholder":
                    self._values[node] = self._arguments[node.name]
                elif node.op == "get_attr":
                    self._values[node] = getattr(self._step.owner, str(node.target))
                elif node.op == "call_function":
                    self._run(node, rank, workspace)
                    rank += 1
        self._values.clear()

    def _run(self, node: fx.Node, rank: int, workspace: dict[str, int]) -> None:
        step, is_forward = self._step, rank < self._step.num_forward
        if not is_forward:
            for storage in step.seen.reads[node.name]:
                found = self._array.maps.get(storage)
                if found is not None and found.first_backward == rank - step.num_forward:
                    self._back(storage)
        values = [self._values[one] for one in node.all_input_nodes]
        places = {one: place for place, one in enumerate(node.all_input_nodes)}
        given = located(tuple(node.args), places), located(dict(node.kwargs), places)
        self._values[node] = self._clock.timed(node.name, partial(self._call, node, *given, values))
        made = sum(step.seen.sizes[storage] for storage in step.seen.makes[node.name])
        workspace[node.name] = max(workspace.get(node.name, 0), self._clock.peak_beyond(made))
        del values
        for storage in (*step.seen.reads[node.name], *step.seen.makes[node.name]) if is_forward else ():
            found = self._array.maps.get(storage)
            if found is not None and found.last_forward == rank:
                self._away(storage)
        for argument in (node, *node.all_input_nodes):
            if self._last[argument] is node and argument.op == "call_function":
                self._values.pop(argument, None)

    def _call(self, node: fx.Node, args: Any, kwargs: Any, values: list[Any]) -> Any:
        args, kwargs = filled(args, values), filled(kwargs, values)  # which takes an interpreter's time, too
        if node.target is draw:
            return self._step.noise[args[0]].draw(self._generators, self._device)
        assert callable(node.target), "an operator"
        return node.target(*args, **kwargs)

    def _away(self, storage: str) -> None:
        """Stage 3."""
        among = [node for node in self._values if storage in self._step.seen.storages.get(node.name, ())]
        tensor = next(
            leaf
            for node in among
            for leaf in tree_leaves(self._values[node])
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() == self._step.seen.sizes[storage]
        )
        if storage not in self._host:
            pins = self._device.type == "cuda"
            size = self._step.seen.sizes[storage]
            self._host[storage] = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        flat = view_of(tensor, torch.uint8, [self._step.seen.sizes[storage]], [1], 0)
        self._clock.timed(f"out {storage}", lambda: self._host[storage].copy_(flat, non_blocking=True))
        for node in among:
            if node.name in self._step.seen.places:
                self._values[node] = None

    def _back(self, storage: str) -> None:
        """Stage 1."""
        flat = torch.empty(self._step.seen.sizes[storage], dtype=torch.uint8, device=self._device)
        self._clock.timed(f"in {storage}", lambda: flat.copy_(self._host[storage], non_blocking=True))
        for node, value in self._values.items():
            place = self._step.seen.places.get(node.name)
            if value is None and place is not None and place.storage == storage:
                self._values[node] = view_of(flat, place.dtype, list(place.size), list(place.stride), place.offset)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
