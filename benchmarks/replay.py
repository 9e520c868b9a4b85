"""Real runs of the pool, played again by the simulator: is the order of commands the same, and the makespan?

Trials that are alike or not, on one to three CPU devices, with memory for all of them or too little, some pruned at their
reports, under several policies. Each run is recorded; then

    pure      a new scheduler that is told the same events gives exactly the same commands
    order     the simulator, from the measured times of units and copies, gives the same commands in the same order
    replay    its makespan over the run's
    profile   the makespan from means only: seconds of each kind of unit, bytes of each shard, one bandwidth

    python benchmarks/replay.py            # three runs of each
    python benchmarks/replay.py --quick    # one run of each

Exits with 1 if a scheduler was not pure, or a replay's makespan is off by more than 5%.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask
from hydra_tune.schedule import make_policy
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.simulate import simulate
from hydra_tune.simulate.profile import parse_profile, recorded_profile
from hydra_tune.simulate.recorded.recording import Recording
from hydra_tune.simulate.recorded.replay import replay

WIDTH, DEPTH, BATCH_SIZE = 128, 6, 32
OFF = 0.05
ALIKE, UNEQUAL = (1.0,) * 4, (1.0, 2.0, 0.5, 1.5)
CASES = [
    # devices, how wide the models are, memory of each device, bandwidth, whether trials are pruned
    ("cpu:1", ALIKE, None, None, False),
    ("cpu:2", ALIKE, None, None, False),
    ("cpu:2", UNEQUAL, None, None, True),
    ("cpu:2", UNEQUAL, "3MiB", "500MB/s", False),
    ("cpu:3", UNEQUAL, "3MiB", "500MB/s", True),
]
POLICIES = ("lrtf", "lrtf_paper", "fair")


def model(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build(factor: float, num_steps: int) -> TrainTask:
    width = int(WIDTH * factor)
    x = torch.randn(num_steps * BATCH_SIZE, width, generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=partial(model, width),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=functional.mse_loss,
        train=TensorDataset(x, x),
        validate=TensorDataset(x[:BATCH_SIZE], x[:BATCH_SIZE]),
        batch_size=BATCH_SIZE,
        epochs=4,
    )


def record(case: tuple, policy: str, num_steps: int) -> Recording:
    devices, factors, memory, bandwidth, prunes = case
    executor = HydraExecutor(
        devices=devices,
        device_memory=memory,
        policy=policy,
        max_concurrent=len(factors) + 2,
        num_shards=3,
        link_bandwidth=bandwidth,
        record=True,
    )
    with executor as pool:
        stream, reports = pool.events(), 0
        jobs = [pool.submit(build(factor, num_steps), events=stream) for factor in (*factors, *factors)]
        running = len(jobs)
        while running:
            event = stream.get()
            if not isinstance(event, Reported):
                running -= 1
                continue
            reports += 1
            if prunes and reports % 5 == 0:
                event.job.prune()
            else:
                event.job.proceed()
    for job in jobs:
        if job.result().error is not None:
            raise job.result().error
    return executor.recording()


def look(case: tuple, policy: str, num_steps: int, table: Table) -> bool:
    recording = record(case, policy, num_steps)
    scheduler = Scheduler(policy=make_policy(policy), max_concurrent=recording.max_concurrent)
    is_pure = all(tuple(scheduler.handle(*made.events)) == made.commands for made in recording.decisions)
    played = replay(recording)
    ratio = played.simulated_seconds / played.recorded_seconds
    scenario = parse_profile(recorded_profile(recording), source="the recording")
    profile = simulate(scenario, policy).makespan_seconds / played.recorded_seconds
    devices, factors, memory, _, prunes = case
    what = ("unequal" if factors is UNEQUAL else "alike") + (", pruned" if prunes else "")
    total = len(played.recorded_orders)
    order = "same" if played.is_same_order else f"same for {played.num_agreeing}"
    figures = (f"{played.recorded_seconds:.2f} s", str(total), "yes" if is_pure else "NO", order)
    table.add_row(devices, what, memory or "ample", policy, *figures, f"{ratio:.4f}", f"{profile:.3f}")
    return is_pure and abs(ratio - 1) <= OFF


def print_all(cases: Sequence[tuple], num_runs: int, num_steps: int) -> bool:
    table = Table(title="real runs and their replays")
    for name in ("devices", "trials", "memory", "policy", "run", "commands", "pure", "order", "replay", "profile"):
        table.add_column(name)
    met = [look(case, policy, num_steps, table) for case in cases for policy in POLICIES for _ in range(num_runs)]
    Console(width=120).print(table)
    print(f"within 5%: {sum(met)} of {len(met)}; load {os.getloadavg()[0]:.1f} at the end")
    return all(met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each, of few steps")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--steps", type=int, default=12, help="steps of each of a trial's 4 epochs; default 12")
    options = parser.parse_args()
    num_runs, num_steps = (1, 4) if options.quick else (options.runs, options.steps)
    torch.set_num_threads(1)
    return 0 if print_all(CASES, num_runs, num_steps) else 1


if __name__ == "__main__":
    sys.exit(main())
