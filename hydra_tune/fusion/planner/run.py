"""A planned pair at work: its prologue, steps in turn, and epilogue.

A pair begins with the first forward of its first sub-array. From then on the two merged graphs take turns, `[BW_0,
FW_1]` and `[BW_1, FW_0]`; what ends it is a last backward of whichever has had its forward. When one of a pair has no
more steps to make, the other goes on alone, forward and backward one after the other, with its own swaps and
recomputations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_tune.fusion.planner.copies import Copies, copies_for
from hydra_tune.fusion.planner.interpreter import Interpreter
from hydra_tune.fusion.planner.rewrite import Merged, losses_of, rewritten
from hydra_tune.fusion.planner.schedule import Schedule, Segment
from hydra_tune.fusion.planner.step_graph import StepGraph
from hydra_tune.fusion.planner.stopwatch import stopwatch_for

_Arguments = Callable[[int], Mapping[str, Tensor]]


class PlannedRun:
    """Runs a schedule's merged graphs.

    Args:
        schedule: what has been decided.
        steps: the graphs of its sub-arrays' steps.
        device: where they compute.
        arguments: of each sub-array: the number of a step -> its graph's arguments, rates for that step among them.
            What they give is asked for once for the forward and once for the backward, and must be the same batch.
        draw: a sub-array's side and the number of its noise -> random numbers.
        merged: its graphs, where they are there already; they are of no device.
    """

    def __init__(
        self,
        schedule: Schedule,
        steps: Sequence[StepGraph],
        device: torch.device,
        arguments: Sequence[_Arguments],
        draw: Callable[[int, int], Tensor],
        merged: Mapping[Segment, Merged] | None = None,
    ) -> None:
        self.merged = rewritten(schedule, steps) if merged is None else merged
        sizes = {
            f"a{side}_{name}": step.seen.sizes[name]
            for side, step in enumerate(steps)
            for name in schedule.decisions[side].swaps
        }
        self._copies: Copies = copies_for(device, sizes)
        self._watch = stopwatch_for(device, self._copies)
        self._graphs = {one: Interpreter(graph, self._copies, draw, device) for one, graph in self.merged.items()}
        self._arguments = arguments
        self._left: dict[str, Any] = {}
        self._begun = [0] * len(steps)
        self._ended = [0] * len(steps)

    @property
    def seconds(self) -> float:
        """That graphs have taken in all, as of `stopwatch.py`."""
        return self._watch.seconds

    def close(self) -> None:
        """End the copying."""
        self._copies.close()

    def run(self, num_steps: Sequence[int], take: Callable[[int, int, Tensor], None] | None = None) -> None:
        """Make steps of all sub-arrays, to their ends.

        Args:
            num_steps: of each.
            take: given a side, the number of a step and its losses when its forward has run.
        """
        wanted = [done + more for done, more in zip(self._ended, num_steps, strict=True)]
        while self._ended != wanted:
            backward = next((s for s, n in enumerate(self._begun) if n > self._ended[s]), None)
            ready = [s for s, n in enumerate(self._begun) if n < wanted[s] and s != backward]
            self.segment(Segment(backward, self._next(ready, backward)), take)

    def segment(self, segment: Segment, take: Callable[[int, int, Tensor], None] | None = None) -> None:
        """Run one merged graph; of one that fails nothing is left, neither values nor copies under way.

        Args:
            segment: which.
            take: as of `run`.
        """
        graph = self._graphs[segment]
        given = self._left
        self._left = {}
        for side, numbers in ((segment.backward, self._ended), (segment.forward, self._begun)):
            if side is not None:
                own = self._arguments[side](numbers[side])
                given |= {f"a{side}_{name}": tensor for name, tensor in own.items()}
        try:
            with self._watch.running():
                found = graph.run({name: given.pop(name) for name in graph.arguments})
        except BaseException:
            given.clear()
            self._copies.give_up()
            raise
        if segment.backward is not None:
            self._ended[segment.backward] += 1
        if segment.forward is not None:
            losses = found.pop(losses_of(segment.forward))
            if take is not None:
                take(segment.forward, self._begun[segment.forward], losses)
            self._begun[segment.forward] += 1
        self._left = found

    @staticmethod
    def _next(ready: list[int], backward: int | None) -> int | None:
        """Whose forward is next: with a backward its partner's, and else the first's."""
        return ready[0] if ready and (backward is None or len(ready) == 1) else None
