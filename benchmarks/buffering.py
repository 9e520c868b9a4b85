"""What double buffering and SHARP are worth on the real pool: HYDRA's Table 3 on CPU devices with a slow link.

Trials with AdamW on two CPU devices that hold a few of their shards each, behind links of 1 GB/s. Units sleep a given time
instead of computing, so that the devices need not share cores; loads, spills and updates are real. Each arm is a pool:

    all         SHARP and double buffering
    no buffer   without double buffering: whatever a unit needs is loaded when it is due
    neither     one trial after the other, so that one device works at a time, and nothing is sent ahead
    last used   as "all", but what was not used for longest makes room, and not what is needed last

    python benchmarks/buffering.py            # three runs of each arm, in turns
    python benchmarks/buffering.py --quick    # one short run of each: only indicative

Prints for each arm its time, over that of all; bytes loaded and spilled; of the loaded ones those that were sent ahead, and in
vain; the seconds that units waited for copies, and the part of the copies' time that nobody waited for. Also for a budget
that holds everything, where nothing must be sent ahead. Losses of all arms have to be the same bits.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
import waiting

from hydra_tune.devices.hardware.discovery import open_devices
from hydra_tune.memory.block import Block
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.pool import Pool
from hydra_tune.quantities import format_bytes
from hydra_tune.schedule import make_policy
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints

WIDTH = 1024
PARAMETER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
SHARD_BYTES = 3 * PARAMETER_BYTES  # AdamW keeps two numbers beside each parameter
WORKING_BYTES = 6 * PARAMETER_BYTES  # gradients, what an update needs, and values at cuts
NUM_DEVICES, NUM_TRIALS, NUM_SHARDS = 2, 4, 4
FORWARD_SECONDS = 0.02
BANDWIDTH = 1_000_000_000


@dataclass(frozen=True)
class Arm:
    """How a pool is made: shards it holds on each device, trials at once, whether bytes are sent ahead, what makes room."""

    capacity: int
    width: int
    sends_ahead: bool
    victims: Callable[[Pager], list[Block]] = Pager.victims


ARMS = {
    "all": Arm(2, NUM_TRIALS, True),
    "no buffer": Arm(2, NUM_TRIALS, False),
    "neither": Arm(2, 1, False),
    "last used": Arm(2, NUM_TRIALS, True, Pager.residents),
    "last used, no buffer": Arm(2, NUM_TRIALS, False, Pager.residents),
    "all, 4 shards": Arm(4, NUM_TRIALS, True),
    "no buffer, 4 shards": Arm(4, NUM_TRIALS, False),
    "last used, 4 shards": Arm(4, NUM_TRIALS, True, Pager.residents),
    "all fits": Arm(NUM_TRIALS * NUM_SHARDS, NUM_TRIALS, True),
    "all fits, no buffer": Arm(NUM_TRIALS * NUM_SHARDS, NUM_TRIALS, False),
}


def run(arm: Arm, num_steps: int, bandwidth: int) -> dict:
    """Train the trials, after one step of each that prepares what they need."""
    budget = arm.capacity * SHARD_BYTES + WORKING_BYTES
    Pager.victims = arm.victims
    devices = open_devices(f"cpu:{NUM_DEVICES}", budget, bandwidth)
    library = PlanLibrary(
        ShardPlanConstraints(budget_bytes=budget, buffer_fraction=0.0, alignment=64, num_shards="layer")
    )
    host_bytes = psutil.virtual_memory().available // 2
    pool = Pool(
        devices,
        library,
        make_policy("lrtf"),
        max_concurrent=arm.width,
        host_bytes=host_bytes,
        instrument=None,
        sends_ahead=arm.sends_ahead,
    )
    try:
        for steps in (1, num_steps):
            start, before = time.perf_counter(), pool.stats().devices.values()
            factors = [0.5 + number / (NUM_TRIALS - 1) for number in range(NUM_TRIALS)]
            tasks = [waiting.build(NUM_SHARDS, WIDTH, FORWARD_SECONDS * each, steps) for each in factors]
            jobs = [pool.submit(task, None, None) for task in tasks]
            results = [job.result() for job in jobs]
            for result in results:
                if result.error is not None:
                    raise result.error
            seconds = time.perf_counter() - start
        after = pool.stats().devices.values()
    finally:
        pool.shutdown()

    def count(name: str) -> float:
        return sum(getattr(one, name) for one in after) - sum(getattr(one, name) for one in before)

    names = ("bytes_in", "bytes_out", "bytes_ahead", "bytes_in_vain", "waiting_seconds", "copying_seconds")
    found = {name: count(name) for name in names}
    return found | {"seconds": seconds, "losses": [result.metrics["train_loss"] for result in results]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of 3 steps for each arm")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm; default 3")
    parser.add_argument("--steps", type=int, default=10, help="steps of each trial; default 10")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="only these; `all` is always there")
    options = parser.parse_args()
    num_rounds, num_steps = (1, 3) if options.quick else (options.rounds, options.steps)
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} at the start; {num_rounds} rounds of {num_steps} steps")
    names = ["all", *(name for name in options.arms if name != "all")]
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name in names:
            runs[name].append(run(ARMS[name], num_steps, BANDWIDTH))
    base = statistics.median(one["seconds"] for one in runs["all"])
    print(
        f"{'':<22}{'seconds':>8}{'ratio':>7}{'in':>10}{'out':>10}{'ahead':>10}{'in vain':>10}{'waited':>8}{'overlap':>8}"
    )
    for name, found in runs.items():
        one = {key: statistics.median(each[key] for each in found) for key in found[0] if key != "losses"}
        sizes = "".join(
            f"{format_bytes(int(one[key])):>10}" for key in ("bytes_in", "bytes_out", "bytes_ahead", "bytes_in_vain")
        )
        overlap = 1 - one["waiting_seconds"] / one["copying_seconds"] if one["copying_seconds"] else 0.0
        print(
            f"{name:<22}{one['seconds']:>8.2f}{one['seconds'] / base:>7.2f}{sizes}{one['waiting_seconds']:>8.2f}{overlap:>8.0%}"
        )
    losses = {tuple(one["losses"]) for found in runs.values() for one in found}
    print(f"load {os.getloadavg()[0]:.1f} at the end; losses {'agree' if len(losses) == 1 else 'DIFFER'}")
    return 0 if len(losses) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
