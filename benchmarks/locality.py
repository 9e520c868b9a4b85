"""Where units run and what that loads, on the real pool: policies compared behind slow links.

Unequal trials on CPU devices whose copy threads are throttled. A unit sleeps instead of computing, so that several devices fit
few cores; everything else is the pool as it is. A setting is written as in docs/results/scheduling.md: P devices that hold C
shards each, N trials of S shards, loading a shard (parameters and optimizer state) takes r times a forward unit.

    python benchmarks/locality.py            # all settings and policies, two sets of trials
    python benchmarks/locality.py --quick    # one set of fewer steps

For each: makespan over the bound of the measured times without copies; loads a unit, a unit being what one command runs and a
load one for which parameters or optimizer state have to come, from the host or another device, while it waits or ahead of it;
and loads a unit after each block's first.

Where all state fits the devices together and `lrtf_paper` loads more than 0.3 times a unit, `lrtf` must load 4 times less
after the first loads. Exits with 1 if it does not.
"""

import argparse
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
import waiting

from hydra_tune.devices.hardware.discovery import open_devices
from hydra_tune.observe.trace.turns import TurnAction
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.runtime.recorder import PoolRecorder
from hydra_tune.schedule import LRTFPaper, make_policy, makespan_bound
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.simulate.recorded.recording import Recording

WIDTH = 128
PARAMETER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
SHARD_BYTES = 3 * PARAMETER_BYTES  # AdamW keeps two numbers beside each parameter
WORKING_BYTES = 6 * PARAMETER_BYTES  # gradients and what an update needs, and values at cuts
FORWARD_SECONDS = 0.01
STATE = ("parameters", "optimizer")
MUCH, LESS = 0.3, 4.0
SECOND = 1e9


@dataclass(frozen=True)
class Setting:
    """P devices that hold C shards each, N trials of S shards, loads of r forward units."""

    num_devices: int
    num_trials: int
    num_shards: int
    capacity: int
    load: float

    def __str__(self) -> str:
        return f"P{self.num_devices} N{self.num_trials} S{self.num_shards} C{self.capacity} r{self.load:g}"

    @property
    def all_fits(self) -> bool:
        """Whether the state of all trials fits the devices together."""
        return self.num_devices * self.capacity >= self.num_trials * self.num_shards

    @property
    def budget_bytes(self) -> int:
        """Memory of each device."""
        return self.capacity * SHARD_BYTES + WORKING_BYTES

    def factors(self, seed: int) -> list[float]:
        """How much longer each trial's units take."""
        drawn = random.Random(seed)
        return [2.0 ** drawn.uniform(-1, 1) for _ in range(self.num_trials)]


SETTINGS = (
    Setting(2, 4, 4, 4, 0.5),
    Setting(2, 4, 4, 8, 0.5),
    Setting(2, 4, 4, 8, 2.0),
    Setting(4, 8, 4, 8, 2.0),
    Setting(4, 8, 4, 10, 2.0),
)
POLICIES = {
    "lrtf": make_policy("lrtf"),
    "lrtf_paper": make_policy("lrtf_paper"),
    "lrtf_paper, idle_only": LRTFPaper(idle_only=True),
    "fair": make_policy("fair"),
    "fifo": make_policy("fifo"),
}


@dataclass(frozen=True)
class Figures:
    """What one run came to."""

    ratio: float
    loads: float
    later_loads: float


def run(setting: Setting, policy: str, seed: int, num_steps: int, library: PlanLibrary) -> Figures:
    """Train the trials twice in one pool: one step each to prepare what they need, and then the run that counts."""
    bandwidth = int(SHARD_BYTES / (setting.load * FORWARD_SECONDS))
    devices = open_devices(f"cpu:{setting.num_devices}", setting.budget_bytes, bandwidth)
    recorder = PoolRecorder(devices, policy, setting.num_trials, "eager")
    host_bytes = psutil.virtual_memory().available // 2
    pool = Pool(
        devices,
        library,
        POLICIES[policy],
        max_concurrent=setting.num_trials,
        host_bytes=host_bytes,
        instrument=None,
        recorder=recorder,
    )
    try:
        for steps in (1, num_steps):
            tasks = [
                waiting.build(setting.num_shards, WIDTH, FORWARD_SECONDS * each, steps)
                for each in setting.factors(seed)
            ]
            jobs = [pool.submit(task, None, None) for task in tasks]
            for result in [job.result() for job in jobs]:
                if result.error is not None:
                    raise result.error
                assert result.num_shards == setting.num_shards
    finally:
        pool.shutdown()
    return figures(recorder.recording(), {job.key for job in jobs}, setting.num_devices)


def figures(recording: Recording, jobs: set[str], num_devices: int) -> Figures:
    """What the jobs that count came to."""
    compute = dict.fromkeys(jobs, 0.0)
    begun, ended = [], []
    met: set[int] = set()
    coming: set[int] = set()
    num_units = num_loads = num_later = 0
    for job, start_ns, end_ns, actions in units(recording, jobs):
        compute[job] += (end_ns - start_ns - sum(action.copy_ns for action in actions)) / SECOND
        begun.append(start_ns)
        ended.append(end_ns)
        brought = brought_for(actions, coming)
        state = [number for number in brought if recording.blocks[number].kind in STATE]
        num_units += 1
        num_loads += bool(state)
        num_later += not met.isdisjoint(state)
        met.update(state)
    span = (max(ended) - min(begun)) / SECOND
    return Figures(span / makespan_bound(compute.values(), num_devices), num_loads / num_units, num_later / num_units)


def brought_for(actions: list[TurnAction], coming: set[int]) -> set[int]:
    """Blocks that came to the device for a unit, from the host or another device, while it waited or ahead of it.

    Args:
        actions: of the unit.
        coming: what was sent ahead and is not used yet; kept from unit to unit.
    """
    found: set[int] = set()
    for action in actions:
        if action.what in ("in", "across"):
            found |= set(action.blocks)
        elif action.what == "lease":
            found |= coming & set(action.blocks)
            coming -= found
        elif action.what == "ahead":
            coming |= set(action.blocks)
        elif action.what == "shed":
            coming -= set(action.blocks)
    return found


def units(recording: Recording, jobs: set[str]) -> Iterator[tuple[str, int, int, list[TurnAction]]]:
    """Job, start, end and actions of each command's units."""
    for turn in recording.turns:
        if turn.job in jobs and turn.units:
            end_ns = turn.units[-1].end_ns
            yield turn.job, turn.units[0].start_ns, end_ns, [a for a in turn.actions if a.at_ns <= end_ns]


def make_library(setting: Setting) -> PlanLibrary:
    """Plans for one setting, whatever the policy."""
    budget = ShardPlanConstraints(
        budget_bytes=setting.budget_bytes, buffer_fraction=0.15, alignment=64, num_shards="layer"
    )
    return PlanLibrary(budget)


def compare(setting: Setting, num_sets: int, num_steps: int) -> bool:
    """Print a line for each policy; returns whether `lrtf` loads as little as it must."""
    library, means = make_library(setting), {}
    for name in POLICIES:
        runs = [run(setting, name, seed, num_steps, library) for seed in range(num_sets)]
        ratio, loads, later = (
            statistics.mean(getattr(one, field) for one in runs) for field in ("ratio", "loads", "later_loads")
        )
        means[name] = loads, later
        print(f"{setting!s:<22}{name:<24}{ratio:>8.3f}{loads:>8.3f}{later:>8.3f}", flush=True)
    loads, later = means["lrtf_paper"]
    least = means["lrtf"][1]
    less = later / least if least else math.inf
    if not setting.all_fits or loads <= MUCH:
        return True
    print(f"{'':<22}lrtf loads {less:.1f} times less after the first loads{'' if less >= LESS else ': MISSED'}")
    return less >= LESS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one set of trials, of 10 steps")
    parser.add_argument("--sets", type=int, default=2, help="sets of trials; default 2")
    parser.add_argument("--steps", type=int, default=30, help="steps of each trial; default 30")
    parser.add_argument("--setting", type=int, choices=range(len(SETTINGS)), help="only this setting, from 0")
    options = parser.parse_args()
    num_sets, num_steps = (1, 10) if options.quick else (options.sets, options.steps)
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} at the start; {num_sets} sets of trials, {num_steps} steps each")
    print(f"{'setting':<22}{'policy':<24}{'/ bound':>8}{'loads':>8}{'later':>8}")
    settings = SETTINGS if options.setting is None else (SETTINGS[options.setting],)
    met = [compare(setting, num_sets, num_steps) for setting in settings]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
