"""Execution of a planned sub-array, or of a pair: prologue, steps in turn, and epilogue.

A pair begins with a forward alone. From then on the two merged graphs alternate, `[BW_0, FW_1]` and `[BW_1, FW_0]`. The
last backward of the sub-array that has had its forward ends the run. When a sub-array has no more steps to make, its
partner goes on alone, forward and backward one after the other, with the partner's own swaps and recomputations.

`DeviceStepRunner` (`fusion/runtime/planned_executor.py`) makes a runner when a planned step first runs on a device, and
closes the runner when a unit comes to another device, when another way of running the step wins, or when the steps end.
Training calls `segment` for each merged graph, in the order that `fusion/runtime/planned_unit.py` and
`fusion/runtime/paired_unit.py` choose; only tests and benchmarks call `run`. The module must not decide what is swapped
or recomputed. A runner takes no lock, because only the thread of the running unit calls `segment`.

Note: ownership. The values that a forward leaves for its backward belong to the runner, and only until the next segment.
A segment that fails drops these values, so a forward has to run again before a backward can.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices.copying import SimulatedLink
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule
from hydra_tune.planner.passes.graph_rewrite import MergedGraph, losses_of, rewritten
from hydra_tune.planner.run.copy_engine import CopyEngine, copies_for
from hydra_tune.planner.run.interpreter import MergedGraphInterpreter
from hydra_tune.planner.run.step_timer import stopwatch_for
from hydra_tune.planner.trace.step_graph import StepGraph

_Arguments = Callable[[int], Mapping[str, Tensor]]


class MergedGraphRunner:
    """Runs the merged graphs of a schedule.

    Args:
        arguments: for each sub-array, number of a step -> arguments of the graph, including the rates for the step.
            Called once for the forward and once for the backward, and must give the same batch both times.
        draw: (side of a sub-array, number of the noise) -> random numbers.
        merged: the merged graphs, where they exist already; merged graphs belong to no device.
        link: as of `copies_for`.
    """

    def __init__(
        self,
        schedule: SubArraySchedule,
        steps: Sequence[StepGraph],
        device: torch.device,
        arguments: Sequence[_Arguments],
        draw: Callable[[int, int], Tensor],
        merged: Mapping[ScheduleSegment, MergedGraph] | None = None,
        link: SimulatedLink | None = None,
    ) -> None:
        self.merged = rewritten(schedule, steps) if merged is None else merged
        # Host memory is looked up by the names that the rewriter writes into the offload nodes.
        sizes = {
            f"a{side}_{name}": step.seen.sizes[name]
            for side, step in enumerate(steps)
            for name in schedule.decisions[side].swaps
        }
        self._copies: CopyEngine = copies_for(device, sizes, link)
        self._watch = stopwatch_for(device, self._copies)
        self._graphs = {
            segment: MergedGraphInterpreter(graph, self._copies, draw, device) for segment, graph in self.merged.items()
        }
        self._arguments = arguments
        self._left: dict[str, Any] = {}
        self._begun = [0] * len(steps)
        self._ended = [0] * len(steps)

    @property
    def seconds(self) -> float:
        """Seconds that graphs have taken in all, as of `step_timer.py`."""
        return self._watch.seconds

    def close(self) -> None:
        """End the copying."""
        self._copies.close()

    def run(self, num_steps: Sequence[int], take: Callable[[int, int, Tensor], None] | None = None) -> None:
        """Make steps of all sub-arrays, to their ends.

        `take` is called with the side, the number of the step and the losses when a forward has run.
        """
        targets = [num_done + num_more for num_done, num_more in zip(self._ended, num_steps, strict=True)]
        while self._ended != targets:
            # At most one sub-array at a time is between its forward and its backward.
            backward = next((s for s, n in enumerate(self._begun) if n > self._ended[s]), None)
            ready_sides = [s for s, n in enumerate(self._begun) if n < targets[s] and s != backward]
            self.segment(ScheduleSegment(backward, self._next(ready_sides, backward)), take)

    def segment(self, segment: ScheduleSegment, take: Callable[[int, int, Tensor], None] | None = None) -> None:
        """Run a merged graph; a graph that fails leaves neither values nor copies under way.

        `take` is as of `run`.
        """
        graph = self._graphs[segment]
        arguments = self._left
        self._left = {}
        for side, numbers in ((segment.backward, self._ended), (segment.forward, self._begun)):
            if side is not None:
                step_arguments = self._arguments[side](numbers[side])
                arguments |= {f"a{side}_{name}": tensor for name, tensor in step_arguments.items()}
        try:
            with self._watch.running():
                # Popped, so that the interpreter holds the last reference and frees each value after its last use.
                outputs = graph.run({name: arguments.pop(name) for name in graph.arguments})
        except BaseException:
            # The traceback keeps this frame alive, and would keep the values' memory with the frame.
            arguments.clear()
            self._copies.give_up()
            raise
        if segment.backward is not None:
            self._ended[segment.backward] += 1
        if segment.forward is not None:
            losses = outputs.pop(losses_of(segment.forward))
            if take is not None:
                take(segment.forward, self._begun[segment.forward], losses)
            self._begun[segment.forward] += 1
        self._left = outputs

    @staticmethod
    def _next(ready: list[int], backward: int | None) -> int | None:
        """Return the sub-array of the next forward: the partner beside a backward, otherwise the first ready."""
        return ready[0] if ready and (backward is None or len(ready) == 1) else None
