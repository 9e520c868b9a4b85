"""What a decision costs: one unit ends, the next one of some job is chosen. Pure Python; no device, no torch.

    python benchmarks/decisions.py
    python benchmarks/decisions.py --ahead    # what it costs to ask what a device would do next

Prints, for each policy and number of eligible jobs, the median in microseconds of CPU time of `Scheduler.handle` on one
`UnitFinished`: the event taken in, the estimate corrected, the choice made, the command and the story written. The loop
that times it makes the event outside of what is timed. `scan` is Algorithm 2 of HYDRA as printed, `one method` a user's
policy that is shown every job every time: both are linear and here to compare with. Of several runs the least median is
printed, because other processes on the machine only ever add.
"""

import argparse
import random
import statistics
import time

from hydra_tune.schedule import (
    POLICIES,
    DeviceAdded,
    JobAdmitted,
    JobSubmitted,
    LRTFPaper,
    NextJobPredictor,
    Policy,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFinished,
)

NUM_SHARDS = 4
NUM_DEVICES = 4
MAX_SECONDS = 2.0  # of one measurement


class OneMethod:
    """A user's policy, given every job every time."""

    def choose(self, device, candidates):  # noqa: D102
        return max(candidates, key=lambda view: (view.shard_device == device, view.remaining_seconds, -view.order))


def policies():
    made = {name: make() for name, make in POLICIES.items()}
    return made | {
        "lrtf_paper, idle_only": LRTFPaper(idle_only=True),
        "lrtf_paper, scan": LRTFPaper(structure="scan"),
        "one method": OneMethod(),
    }


def loaded(policy: Policy, num_jobs: int, stream: random.Random):
    """A scheduler with all devices busy and `num_jobs` eligible jobs beside, and what runs."""
    scheduler = Scheduler(policy=policy, max_concurrent=num_jobs + NUM_DEVICES)
    scheduler.handle(*[DeviceAdded(device=f"gpu:{index}") for index in range(NUM_DEVICES)])
    jobs = [f"job{index}" for index in range(num_jobs + NUM_DEVICES)]
    scheduler.handle(*[JobSubmitted(job=job) for job in jobs])
    unit = Unit(kind="forward", shard=0, seconds=1.0)
    admitted = [
        JobAdmitted(job=job, unit=unit, remaining_seconds=stream.uniform(1e6, 4e6), step_seconds=stream.uniform(5, 20))
        for job in jobs
    ]
    runs = [command for command in scheduler.handle(*admitted) if isinstance(command, Run)]
    for job in jobs:
        device = stream.choice([None, *scheduler.running])
        scheduler.handle(*[ShardMoved(job=job, shard=shard, device=device) for shard in range(NUM_SHARDS)])
    return scheduler, runs


def microseconds(policy: Policy, num_jobs: int, num_decisions: int, *, asks: bool) -> float:
    """Median CPU time of one decision, or of what asking ahead for its device adds to it."""
    stream = random.Random(0)
    scheduler, runs = loaded(policy, num_jobs, stream)
    ahead = NextJobPredictor(policy, scheduler)
    for job in scheduler.phases:
        ahead.notice(job)
    taken, ends = [], time.perf_counter() + MAX_SECONDS
    for _ in range(num_decisions):
        run = runs.pop(0)
        shard = (run.unit.shard + 1) % NUM_SHARDS
        unit = Unit(kind="forward", shard=shard, seconds=1.0)
        event = UnitFinished(
            job=run.job, device=run.device, seconds=stream.uniform(0.8, 1.3), unit=unit, remaining_seconds=None
        )
        start = time.thread_time_ns()
        commands = scheduler.handle(event)
        if asks:
            start = time.thread_time_ns()
            for job in {run.job, *(command.job for command in commands)}:
                ahead.notice(job)
                ahead.unclaim(job)
            own = scheduler.view_after(
                commands[0].job, unit=unit, seconds=1.0, remaining_seconds=1e6, shard_device=None
            )
            ahead.choose(commands[0].device, own)
        taken.append(time.thread_time_ns() - start)
        runs += commands
        if time.perf_counter() > ends:
            break
    return statistics.median(taken) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[10, 100, 1_000, 10_000], help="eligible jobs")
    parser.add_argument("--decisions", type=int, default=5_000, help="decisions to take the median of")
    parser.add_argument("--ahead", action="store_true", help="what asking ahead adds, in place of the decision itself")
    parser.add_argument("--repeats", type=int, default=3, help="runs to take the least median of")
    arguments = parser.parse_args()
    print(f"{'us per decision, jobs:':<24}" + "".join(f"{num_jobs:>10,}" for num_jobs in arguments.jobs))
    for name, policy in policies().items():
        row = [
            min(
                microseconds(policy, num_jobs, arguments.decisions, asks=arguments.ahead)
                for _ in range(arguments.repeats)
            )
            for num_jobs in arguments.jobs
        ]
        print(f"{name:<24}" + "".join(f"{value:>10.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
