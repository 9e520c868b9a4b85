"""Steps of a portfolio's members, measured: in turns on a CPU, one member after the other on a GPU.

A CPU that others have a part in changes its pace within a second, which profiles look at
(`planner/profile/clock_drift.py`). Steps are told at the pace of the profiles, so that what was predicted can be held
against them, and as they took by the clock beside.
"""

import gc
import statistics
import time
from dataclasses import dataclass

import torch

from hydra_tune.batched.batched_random import GroupGenerator
from hydra_tune.planner.ir.plan_state import ScheduleSegment
from hydra_tune.planner.profile.clock_drift import CpuPaceMeter
from hydra_tune.planner.profile.profiling_interpreter import made_up
from hydra_tune.planner.run.runner import MergedGraphRunner
from hydra_tune.planner.search.tournament import SpeedTournament

LEAST_STEPS = 3


class Runners:
    """What members run, by their number; on a GPU parts that run one after the other have tensors in common.

    With a simulated link, copies of a CPU go over the link.
    """

    def __init__(self, family, members, link=None):
        self._family, self._known, self._link = family, {}, link
        self._parts = [[self._runner(part) for part in one.parts] for one in members]

    def step(self, number):
        """Seconds of a step of all trials."""
        self._settle()
        start = time.perf_counter()
        for run, segments, _ in self._parts[number]:
            for segment in segments:
                run.segment(segment)
        self._settle()
        return time.perf_counter() - start

    def part(self, number, place):
        """A part of a member: what runs it, and its segments."""
        run, segments, _ = self._parts[number][place]
        return run, segments

    def held(self, number, place):
        """The tensors of the device that a part has between its steps: arguments, and what a forward has left."""
        run, _, own = self._parts[number][place]
        left = [value for name, value in run._left.items() if not name.endswith("_on_host")]  # noqa: SLF001 - for a tracker
        return [*left, *(tensor for found in own for tensor in found.values())]

    def close(self):
        """Give back what they have."""
        for parts in self._parts:
            for run, *_ in parts:
                run.close()

    def _runner(self, part):
        """Makes one step of a part; on numbers made up, for they decide nothing."""
        device = self._family.device
        steps = [self._family.step(size) for size in part.sizes]
        groups = [GroupGenerator([torch.Generator(device) for _ in range(size)]) for size in part.sizes]
        own = [
            self._arguments(side, size, step) for side, (size, step) in enumerate(zip(part.sizes, steps, strict=True))
        ]
        given = [lambda _number, found=found: found for found in own]

        def draw(side, number):
            return steps[side].noise[number].draw(groups[side], device)

        run = MergedGraphRunner(part.schedule, steps, device, given, draw, link=self._link)
        if len(steps) > 1:
            run.segment(ScheduleSegment(None, 0))
        return run, part.schedule.segments, own

    def _settle(self):
        if self._family.device.type == "cuda":
            torch.cuda.synchronize(self._family.device)

    def _arguments(self, side, size, step):
        key = (side, size)
        if self._family.device.type != "cuda" or key not in self._known:
            self._known[key] = {name: made_up(like, self._family.device) for name, like in step.geometry.items()}
        return self._known[key]


@dataclass
class Measured:
    """What a step takes.

    Attributes:
        seconds: on a CPU at the pace of the profiles.
        clock_seconds: by the clock.
        peak_bytes: on a GPU the most that were allocated.
    """

    seconds: float
    clock_seconds: float
    peak_bytes: int | None = None


def in_turn(family, members, warm_up, steps, leaves_at=None, most_seconds=float("inf")):
    """What a step of each takes on a CPU; they take turns, at least three after so many seconds.

    With `leaves_at` who is that many times slower leaves.
    """
    runners = Runners(family, members)
    found = raced(runners, len(members), family.pace_seconds, warm_up, steps, leaves_at, most_seconds)
    runners.close()
    return found


def raced(runners, count, pace_seconds, warm_up, steps, leaves_at=None, most_seconds=float("inf")):
    """As `in_turn`, of so many members whose runners are there and stay, at the pace at which `CpuPaceMeter` takes so long."""
    race = SpeedTournament(range(count), warm_ups=warm_up, turns=steps, leaves_at=leaves_at or float("inf"))
    pace, clocks, done = CpuPaceMeter(time.perf_counter), [[] for _ in range(count)], [0] * count
    start, before = time.perf_counter(), pace.seconds()
    while (number := race.next) is not None:
        seconds = runners.step(number)
        after = pace.seconds(seconds)
        race.took(seconds * pace_seconds / ((before + after) / 2))
        before = after
        done[number] += 1
        if done[number] > warm_up:
            clocks[number].append(seconds)
        if min(done) >= warm_up + LEAST_STEPS and time.perf_counter() - start > most_seconds:
            break
    return [Measured(race.seconds[number], statistics.median(clocks[number])) for number in range(count)]


def one_by_one(family, members, warm_up, warm_seconds, steps):
    """What a step of each takes, each with the GPU's memory to itself; no more than some seconds of warming up."""
    found = []
    for one in members:
        gc.collect()
        before = torch.cuda.memory_allocated(family.device)
        runners = Runners(family, [one])
        start = time.perf_counter()
        for number in range(warm_up):
            runners.step(0)
            if time.perf_counter() - start > warm_seconds:
                print(f"{one.name}: {number + 1} steps of warming up, not {warm_up}", flush=True)
                break
        torch.cuda.reset_peak_memory_stats(family.device)
        times = [runners.step(0) for _ in range(steps)]
        peak = torch.cuda.max_memory_allocated(family.device) - before
        usual = statistics.median(times)
        found.append(Measured(usual, usual, peak))
        runners.close()
        del runners
    return found
