"""What the pool costs and gains, as ratios within one run.

Eight equal transformer trials, in five arms that take turns, each in a process of its own:

    cpu:1, cpu:2   the pool with all the memory it likes, on one device and on two
    spilled        the pool on two devices whose budget is 40% of ONE model's training peak
    plain-1, -2    plain PyTorch, one trial after another, with 1 and 2 intra-op threads

    python benchmarks/pool.py            # five runs of each arm that count
    python benchmarks/pool.py --quick    # one short run of each arm: only indicative

Times are of the wall clock and include everything the pool does, capture and pilot too. A ratio is that of two medians.
Times taken while the machine does something else mean nothing, so a run counts only if it is within 10% of its arm's
fastest; arms that are short of runs get more turns, up to three times as many. Exits with 1 if a target is missed, with
2 if the machine was too busy to tell.
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
QUIET = 1.1

Run = dict[str, float]


def start_arm(arm: str, num_steps: int, budget_bytes: int) -> Run:
    """Run one arm in a fresh process."""
    threads = arm[-1] if arm.startswith("plain") else "1"
    command = [sys.executable, __file__, "--arm", arm, "--steps", str(num_steps), "--budget", str(budget_bytes)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": threads}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def spread(runs: list[Run]) -> float:
    """(longest - shortest) / median."""
    seconds = [run["seconds"] for run in runs]
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def machine() -> str:
    """The processor, by the name it gives itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}"


def quiet(runs: list[Run]) -> list[Run]:
    """The runs of an arm that are within 10% of its fastest."""
    fastest = min((run["seconds"] for run in runs), default=0.0)
    return [run for run in runs if run["seconds"] <= QUIET * fastest]


def run_arms(num_rounds: int, num_steps: int, budget_bytes: int) -> dict[str, list[Run]]:
    """Run the arms in turns, forwards and backwards, until enough runs of each count."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for number in range(3 * num_rounds):
        short = [arm for arm in ARMS if len(quiet(runs[arm])) < num_rounds]
        for arm in short if number % 2 == 0 else reversed(short):
            runs[arm].append(start_arm(arm, num_steps, budget_bytes))
        if short:
            times = ", ".join(f"{arm} {runs[arm][-1]['seconds']:.1f}s" for arm in short)
            print(f"round {number + 1}: {times}", flush=True)
    losses = {
        arm: {run["loss"] for run in runs[arm]} for arm in ARMS if arm != "plain-2"
    }  # two threads round otherwise
    if len(set.union(*losses.values())) != 1:
        raise SystemExit(f"the arms disagree on the loss: {losses}")
    return runs


def median(runs: list[Run], key: str) -> float:
    """The median of one figure."""
    return statistics.median(run[key] for run in runs)


def print_arms(runs: dict[str, list[Run]]) -> None:
    """Print a line per arm."""
    names = f"{'arm':<9}{'runs':>7}{'seconds':>9}{'spread':>8}{'CPU s':>8}{'shards':>8}"
    print(f"\n{names}{'peak':>11}{'in':>11}{'out':>11}{'busy':>7}{'decide':>8}")
    for arm, every in runs.items():
        counted = quiet(every)
        line = f"{arm:<9}{f'{len(counted)}/{len(every)}':>7}{median(counted, 'seconds'):>9.2f}{spread(counted):>8.0%}"
        line += f"{median(counted, 'cpu_seconds'):>8.2f}"
        if "num_shards" in counted[0]:
            sizes = "".join(
                f"{format_bytes(median(counted, key)):>11}" for key in ("peak_bytes", "bytes_in", "bytes_out")
            )
            shares = f"{median(counted, 'busy_share'):>7.0%}{median(counted, 'scheduler_share'):>8.2%}"
            line += f"{counted[0]['num_shards']:>8}{sizes}{shares}"
        print(line)


def print_ratios(runs: dict[str, list[Run]]) -> bool:
    """Print each ratio beside its target; returns whether all are met."""
    seconds = {arm: median(quiet(runs[arm]), "seconds") for arm in ARMS}
    share = max(median(quiet(runs[arm]), "scheduler_share") for arm in ARMS if not arm.startswith("plain"))
    two, spilled = seconds["cpu:1"] / seconds["cpu:2"], min(seconds["plain-1"], seconds["plain-2"]) / seconds["spilled"]
    lines = [
        ("cpu:2 against cpu:1, speed", f"{two:.2f}", ">= 1.7", two >= 1.7),
        ("spilled against the faster plain, speed", f"{spilled:.2f}", ">= 0.65", spilled >= 0.65),
        ("deciding what to run, share of the time", f"{share:.2%}", "< 1%", share < 0.01),
    ]
    print(f"\n{'ratio':<42}{'median':>8}{'target':>10}")
    for name, value, target, met in lines:
        print(f"{name:<42}{value:>8}{target:>10}  {'met' if met else 'MISSED'}")
    return all(met for *_, met in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of few steps for each arm")
    parser.add_argument("--rounds", type=int, help="runs of each arm that must count; default 5, with --quick 1")
    parser.add_argument("--steps", type=int, help="steps per trial; default 30, with --quick 8")
    parser.add_argument("--arm", choices=ARMS, help="run only this arm, in this process, and print it as JSON")
    parser.add_argument("--budget", type=int, help="with --arm spilled: bytes per device")
    options = parser.parse_args()
    num_steps = options.steps or (8 if options.quick else 30)
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
    runs = run_arms(num_rounds, num_steps, budget_bytes)
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    print(f"one plain step on one thread: {median(quiet(runs['plain-1']), 'step_seconds') * 1000:.0f} ms")
    print_arms(runs)
    met = print_ratios(runs)
    if min(len(quiet(every)) for every in runs.values()) < num_rounds:
        print("\nthe machine was too busy to tell: close what runs beside this, and run it again")
        return 2
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
