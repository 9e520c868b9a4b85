"""Algorithm A: the seconds and memory of each node of a step's graph, and the seconds of each feature map's copies.

`StepPlanner` (`fusion/runtime/step_planner.py`) has each step profiled before the first plan of the step;
`pool/dry_run/step_profiles.py` hands the profiler to `TaskProfileCache` (`fusion/runtime/task_profiles.py`) for
`HydraExecutor.plan(profile=...)` and `hydra-tune plan --profile`. Both apply `over_link` where a device has a simulated
link. The callers borrow the device, share `GATE` (`shard/capture/capture_lock.py`) and compute with a single thread
meanwhile: the profiler does none of these. `output_layouts.py` uses `array_of`, `CpuClock` and an empty
`GraphMeasurements`. The module must not know plans.

The graph runs node by node on made-up numbers, with a single warm-up and three measured runs. Times are medians of the
runs, and a node's workspace is the largest of the runs. Every feature map goes to the host after its last use in the
forward, and comes back before its first use in the backward (stages 1 and 3). So a sub-array can be profiled whose
feature maps do not fit the device together. On CUDA a node's time is the time of its kernels. The kernels are launched
behind a pause of about 0.2 ms, so that launches within the pause do not count; views count no time.

Differs: where the host computes, reading the clock takes as long as a small node, and a node right behind another finds
more in the caches. So each run is followed by passes that time only whole stretches between copies, and the nodes'
times are scaled to add up to the passes. The pace of the machine is measured beside each pass (`clock_drift.py`).
Graphs that are profiled one after another on a device are all reported at the pace of the device's first graph.

Where another thread copies, the time that the computing thread needs for a hand-over is measured once for each device
(`copy_handoff_cost.py`). A feature map whose two copies take no longer than two hand-overs is left to the computing
thread.

Note: lock. `SubArrayProfiler` measures under its lock, so other threads wait as long as a profile takes, except in
`pace_seconds`.
"""

import hashlib
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from hydra_tune.devices.hardware.heap import PLAN_BYTES, keep_freed_memory
from hydra_tune.planner.ir.aliasing import overwritten
from hydra_tune.planner.ir.planner_ops import draw
from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile
from hydra_tune.planner.profile.clock_drift import CpuPaceMeter, PacedTimer
from hydra_tune.planner.profile.copy_handoff_cost import hand_seconds
from hydra_tune.planner.profile.profiling_interpreter import ProfilingClock, ProfilingInterpreter
from hydra_tune.planner.trace.step_graph import StepGraph

WARM_UPS, RUNS = 1, 3
WHOLE_PASSES = 2
"""Passes over the whole step after each run, where the host's time counts."""

_LOOKS = 31
_MAX_KEPT = 256  # profiles: a search over widths makes new graphs for as long as the pool lives


class CpuClock:
    """Time of the host.

    Args:
        now: returns seconds; the calling thread's CPU time, which `clock_of` (`fusion/runtime/step_planner.py`) gives,
            leaves out the work of other threads.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._found: dict[str, float] = {}

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """As of `ProfilingClock`."""
        begin = self._now()
        result = action()
        self._found[name] = self._now() - begin
        return result

    def seconds(self) -> dict[str, float]:
        """As of `ProfilingClock`."""
        records, self._found = self._found, {}
        return records

    def whole(self) -> float | None:
        """As of `ProfilingClock`."""
        return self._now()

    def peak_beyond(self, made_bytes: int) -> int:
        """Return 0, because a CPU does not report peaks."""
        del made_bytes
        return 0


class CudaClock:
    """Kernel time between events, behind a pause in which the host gets ahead; resets the GPU's peak of memory each time."""

    _PAUSE_CYCLES = 400_000  # about 0.2 ms

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._before = 0

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """As of `ProfilingClock`."""
        begin, end, stream = _event(), _event(), torch.cuda.current_stream(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        with torch.cuda.device(self._device):  # the thread's current device may differ
            torch.cuda._sleep(self._PAUSE_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's own tests use it so
        begin.record(stream)
        result = action()
        end.record(stream)
        self._events[name] = begin, end
        return result

    def seconds(self) -> dict[str, float]:
        """As of `ProfilingClock`."""
        torch.cuda.current_stream(self._device).synchronize()  # not the whole GPU, which others may use as well
        records = {name: begin.elapsed_time(end) / 1000 for name, (begin, end) in self._events.items()}
        self._events = {}
        return records

    def whole(self) -> float | None:
        """As of `ProfilingClock`."""
        return None

    def peak_beyond(self, made_bytes: int) -> int:
        """As of `ProfilingClock`."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before - made_bytes)


@dataclass(frozen=True, slots=True)
class GraphMeasurements:
    """Measurements, by node or storage name.

    Attributes:
        out_seconds: of each feature map's copy to the host.
        in_seconds: of each feature map's copy back.
        hand_seconds: of the computing thread, for each copy that another thread makes.
        pace_seconds: of `CpuPaceMeter` at the pace to which `seconds` refer; 0 where the host does not time the nodes.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    out_seconds: dict[str, float] = field(default_factory=dict)
    in_seconds: dict[str, float] = field(default_factory=dict)
    hand_seconds: float = 0.0
    pace_seconds: float = 0.0

    def at_pace(self, pace_seconds: float) -> "GraphMeasurements":
        """Return the profile at the pace at which `CpuPaceMeter` takes so many seconds.

        Copies keep their times, because they wait for memory and not for the processor.
        """
        if not (pace_seconds and self.pace_seconds):
            return self
        ratio = pace_seconds / self.pace_seconds
        return replace(
            self,
            seconds={name: node_seconds * ratio for name, node_seconds in self.seconds.items()},
            pace_seconds=pace_seconds,
        )


class SubArrayProfiler:
    """Measures graphs on devices, and reports operators' seconds at the pace of the device's first graph.

    The `_MAX_KEPT` profiles that were asked for last are kept; a graph with a dropped profile is measured again.

    Args:
        clock: device -> clock; None: chosen by the kind of the device.
        hand: device -> seconds to hand over a copy; called once for each device.
    """

    def __init__(
        self,
        clock: Callable[[torch.device], ProfilingClock] | None = None,
        hand: Callable[[torch.device], float] = hand_seconds,
    ) -> None:
        self._hand, self._hands = hand, dict[str, float]()
        self._paces: dict[str, float] = {}
        self._clock = clock or (lambda device: CudaClock(device) if device.type == "cuda" else CpuClock())
        self._known: OrderedDict[tuple[str, str], GraphMeasurements] = OrderedDict()  # the last asked for at the end
        self._lock = threading.Lock()

    def array(self, name: str, step: StepGraph, device: torch.device) -> SubArrayProfile:
        """Return the profiled sub-array of a step's graph."""
        with self._lock:
            # The lock is held while measuring, so that no graph is measured twice and profiles do not disturb each
            # other.
            key = _key_of(step), str(device)
            if key not in self._known:
                if str(device) not in self._hands:
                    self._hands[str(device)] = self._hand(device)
                measurements = measured(step, device, self._clock(device))
                pace = self._paces.setdefault(str(device), measurements.pace_seconds)
                self._known[key] = replace(measurements.at_pace(pace), hand_seconds=self._hands[str(device)])
                if len(self._known) > _MAX_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return array_of(name, step, self._known[key])

    def knows(self, step: StepGraph, device: torch.device) -> bool:
        """Whether the profile of a graph on a device is kept."""
        with self._lock:
            return (_key_of(step), str(device)) in self._known

    def pace_seconds(self, device: torch.device) -> float:
        """Seconds of `CpuPaceMeter` to which a device's times refer; 0 before any graph, and where the host times nothing."""
        # Without the lock, which another thread holds for as long as it measures; a dict's `get` is atomic.
        return self._paces.get(str(device), 0.0)


def measured(step: StepGraph, device: torch.device, clock: ProfilingClock) -> GraphMeasurements:
    """Profile a graph."""
    if device.type == "cpu":
        keep_freed_memory(PLAN_BYTES)  # as planned runs do
    run = ProfilingInterpreter(step, array_of("", step, GraphMeasurements()).maps, device, clock)
    workspace: dict[str, int] = {}
    records: list[dict[str, float]] = []
    passes = PacedTimer(CpuPaceMeter(lambda: clock.whole() or 0.0))
    for number in range(WARM_UPS + RUNS):
        # A warm-up does not count: memory that a library takes for good (cuBLAS's workspace of a stream) is taken once.
        run.once(workspace if number >= WARM_UPS else {})
        record = clock.seconds()
        if clock.whole() is not None:
            passes.time(run.whole, WHOLE_PASSES, counts=number >= WARM_UPS)
        # The passes have timed their copies as well: drop those.
        clock.seconds()
        if number >= WARM_UPS:
            records.append(record)
    medians = {name: statistics.median(entry[name] for entry in records) for name in records[0]}
    if passes.seconds:
        medians |= _scaled({node.name: medians[node.name] for node in step.ops}, clock, passes.seconds)
    nodes = {node.name for node in step.ops}
    free = {node.name for node in step.ops if _is_view(step, node)} if device.type == "cuda" else set()
    return GraphMeasurements(
        seconds={name: seconds for name, seconds in medians.items() if name in nodes - free},
        workspace_bytes=workspace,
        # The interpreter times copies under the names `out STORAGE` and `in STORAGE`.
        out_seconds={name[4:]: seconds for name, seconds in medians.items() if name.startswith("out ")},
        in_seconds={name[3:]: seconds for name, seconds in medians.items() if name.startswith("in ")},
        pace_seconds=passes.pace_seconds,
    )


def array_of(name: str, step: StepGraph, profile: GraphMeasurements) -> SubArrayProfile:
    """Return the sub-array of a step's graph with the times of a profile."""
    facts = step.seen
    ops = [
        OperatorProfile(
            name=node.name,
            seconds=profile.seconds.get(node.name, 0.0),
            reads=facts.reads[node.name],
            makes=facts.makes[node.name],
            writes=facts.writes[node.name],
            # A recomputation passes None in place of running statistics (`without_statistics`).
            repeated_writes=facts.writes[node.name] if overwritten(node)[1] else (),
            workspace_bytes=profile.workspace_bytes.get(node.name, 0),
            is_random=node.target is draw,
        )
        for node in step.ops
    ]
    made_storages = {storage for op in ops for storage in op.makes}
    (output,) = (node for node in step.graph.nodes if node.op == "output")
    return SubArrayProfile(
        name=name,
        forward=tuple(ops[: step.num_forward]),
        backward=tuple(ops[step.num_forward :]),
        sizes={storage: size for storage, size in facts.sizes.items() if storage in made_storages},
        static_bytes=sum(size for storage, size in facts.sizes.items() if storage not in made_storages),
        out_seconds=profile.out_seconds,
        in_seconds=profile.in_seconds,
        at_once=_at_once(profile.out_seconds, profile.in_seconds, profile.hand_seconds),
        hand_seconds=profile.hand_seconds,
        results=frozenset(facts.storages[output.args[0][0].name]),
        returning=_returning(step),
    )


def copied_at(array: SubArrayProfile, bytes_per_second: float, seconds: float = 0.0) -> SubArrayProfile:
    """Return the same sub-array on a link of another bandwidth."""
    times = {name: feature_map.num_bytes / bytes_per_second + seconds for name, feature_map in array.maps.items()}
    return replace(array, out_seconds=times, in_seconds=times, at_once=_at_once(times, times, array.hand_seconds))


def over_link(array: SubArrayProfile, bytes_per_second: float) -> SubArrayProfile:
    """Return a profiled sub-array whose copies go over a simulated link as well, and take no less time than there.

    The computing thread makes none of these copies itself, because it would sleep meanwhile.
    """
    link_seconds = {name: feature_map.num_bytes / bytes_per_second for name, feature_map in array.maps.items()}
    out, back = (
        {name: max(seconds, link_seconds[name]) for name, seconds in copies.items()}
        for copies in (array.out_seconds, array.in_seconds)
    )
    return replace(array, out_seconds=out, in_seconds=back, at_once=frozenset())


def _at_once(out: Mapping[str, float], back: Mapping[str, float], hand_seconds: float) -> frozenset[str]:
    """Storages whose two copies together take no longer than the two hand-overs."""
    return frozenset(name for name, seconds in out.items() if seconds + back[name] <= 2 * hand_seconds)


def _scaled(seconds: dict[str, float], clock: ProfilingClock, whole: float) -> dict[str, float]:
    """Return the nodes' times without the time to read the clock, scaled to add up to `whole`."""
    looks: list[float] = []
    for _ in range(_LOOKS):
        clock.timed("nothing", _nothing)
        looks.append(clock.seconds()["nothing"])
    look = statistics.median(looks)
    # A node as short as a look at the clock keeps a quarter of its time: nothing takes no time at all.
    net_seconds = {name: max(node_seconds - look, node_seconds / 4) for name, node_seconds in seconds.items()}
    ratio = whole / sum(net_seconds.values())
    return {name: node_seconds * ratio for name, node_seconds in net_seconds.items()}


def _nothing() -> None:
    pass


def _returning(step: StepGraph) -> frozenset[str]:
    """Storages of the forward that the backward neither overwrites nor puts into tuples: their views can be made anew."""
    facts = step.seen
    backward = step.ops[step.num_forward :]
    written_storages = {storage for node in backward for storage in facts.writes[node.name]}
    tuple_storages = {
        storage for node in backward if node.name not in facts.places for storage in facts.storages[node.name]
    }
    made_storages = {storage for node in step.ops[: step.num_forward] for storage in facts.makes[node.name]}
    return frozenset(made_storages - written_storages - tuple_storages)


def _is_view(step: StepGraph, node: fx.Node) -> bool:
    """Whether a node makes and overwrites nothing, and so takes no time on a GPU."""
    return not step.seen.makes[node.name] and not step.seen.writes[node.name]


def _key_of(step: StepGraph) -> str:
    # The text of a graph has no geometry, and the geometry decides the times. A hash, because the text may be long.
    shapes = {name: (tensor.dtype, tuple(tensor.shape), tensor.stride()) for name, tensor in step.geometry.items()}
    return hashlib.sha256(f"{step.graph}{shapes}".encode()).hexdigest()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
