"""What the pool costs and gains, as ratios within one run.

Eight equal transformer trials, in five arms that take turns, each in a process of its own:

    cpu:1, cpu:2   the pool with all the memory it likes, on one device and on two
    spilled        the pool on two devices whose budget is 40% of ONE model's training peak
    plain-1, -2    plain PyTorch, one trial after another, with 1 and 2 intra-op threads

    python benchmarks/pool.py            # five rounds
    python benchmarks/pool.py --quick    # one short round: the numbers are only indicative

Times are of the wall clock and include everything the pool does, capture and pilot too. Ratios are taken within a
round, and the median over the rounds is what counts. Exits with 1 if a target is missed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from arms import ARMS, NUM_TRIALS, run_arm, training_peak_bytes

from hydra_tune.quantities import format_bytes

BUDGET_SHARE = 0.4
SCHEDULER_SHARE = 0.01


def start_arm(arm: str, num_steps: int, budget_bytes: int) -> dict[str, float]:
    """Run one arm in a fresh process."""
    threads = arm[-1] if arm.startswith("plain") else "1"
    command = [sys.executable, __file__, "--arm", arm, "--steps", str(num_steps), "--budget", str(budget_bytes)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": threads}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def machine() -> str:
    """The processor, by the name it gives itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}"


def print_arms(rounds: list[dict[str, dict[str, float]]]) -> None:
    print(
        f"\n{'arm':<9}{'seconds':>9}{'spread':>8}{'CPU s':>8}{'shards':>8}{'peak':>11}{'in':>11}{'out':>11}{'busy':>7}"
    )
    for arm in ARMS:
        runs = [done[arm] for done in rounds]
        seconds = [run["seconds"] for run in runs]
        cpu_seconds = statistics.median(run["cpu_seconds"] for run in runs)
        line = f"{arm:<9}{statistics.median(seconds):>9.2f}{spread(seconds):>8.0%}{cpu_seconds:>8.2f}"
        if "num_shards" in runs[0]:
            first = runs[0]
            sizes = "".join(f"{format_bytes(first[key]):>11}" for key in ("peak_bytes", "bytes_in", "bytes_out"))
            line += f"{first['num_shards']:>8}{sizes}{statistics.median(run['busy_share'] for run in runs):>7.0%}"
        print(line)


def print_ratios(rounds: list[dict[str, dict[str, float]]]) -> bool:
    """Print each ratio beside its target; returns whether all are met."""

    def fastest_plain(done):
        return min(done["plain-1"]["seconds"], done["plain-2"]["seconds"])

    ratios = {
        "cpu:2 against cpu:1, speed": ([d["cpu:1"]["seconds"] / d["cpu:2"]["seconds"] for d in rounds], 1.7),
        "spilled against the faster plain, speed": ([fastest_plain(d) / d["spilled"]["seconds"] for d in rounds], 0.65),
    }
    all_met = True
    print(f"\n{'ratio':<42}{'median':>8}{'spread':>8}{'target':>10}")
    for name, (values, target) in ratios.items():
        met = statistics.median(values) >= target
        all_met &= met
        mark = "met" if met else "MISSED"
        print(f"{name:<42}{statistics.median(values):>8.2f}{spread(values):>8.0%}{f'>= {target}':>10}  {mark}")
    share = max(done[arm]["scheduler_share"] for done in rounds for arm in ("cpu:1", "cpu:2", "spilled"))
    met = share < SCHEDULER_SHARE
    name, mark = "scheduler time, share of the run (worst)", "met" if met else "MISSED"
    print(f"{name:<42}{share:>8.2%}{'':>8}{'< 1%':>10}  {mark}")
    return all_met and met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument("--rounds", type=int, help="rounds; default 5, with --quick 1")
    parser.add_argument("--steps", type=int, help="steps per trial; default 25, with --quick 8")
    parser.add_argument("--arm", choices=ARMS, help="run only this arm, in this process, and print it as JSON")
    parser.add_argument("--budget", type=int, help="with --arm spilled: bytes per device")
    options = parser.parse_args()
    num_steps = options.steps or (8 if options.quick else 25)
    num_rounds = options.rounds or (1 if options.quick else 5)
    if options.arm:
        print(json.dumps(run_arm(options.arm, num_steps, options.budget or int(BUDGET_SHARE * training_peak_bytes()))))
        return 0
    torch.set_num_threads(1)
    peak_bytes = training_peak_bytes()
    budget_bytes = int(BUDGET_SHARE * peak_bytes)
    print(machine())
    print(f"{NUM_TRIALS} trials of {num_steps} steps, {num_rounds} rounds; load {os.getloadavg()[0]:.1f} at the start")
    print(f"one model's training peak {format_bytes(peak_bytes)}; budget {format_bytes(budget_bytes)} per device")
    rounds = []
    for number in range(num_rounds):
        order = ARMS if number % 2 == 0 else ARMS[::-1]
        rounds.append({arm: start_arm(arm, num_steps, budget_bytes) for arm in order})
        done = rounds[-1]
        print(f"round {number + 1}: " + ", ".join(f"{arm} {done[arm]['seconds']:.1f}s" for arm in ARMS), flush=True)
        if len({done[arm]["loss"] for arm in ARMS if arm != "plain-2"}) != 1:
            raise SystemExit(f"the arms disagree on the losses: { {arm: done[arm]['loss'] for arm in ARMS} }")
    step_seconds = statistics.median(done["plain-1"]["step_seconds"] for done in rounds)
    print(f"one plain step on one thread: {step_seconds * 1000:.0f} ms")
    print_arms(rounds)
    return 0 if print_ratios(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
