"""The common case: models that fit, a handful of trials, a `DataLoader`, each beside a plain loop that anyone would write.

    python benchmarks/common_case.py                        # half an hour on two cores
    python benchmarks/common_case.py --rows mlp,loader2     # some rows
    python benchmarks/common_case.py --quick                # one round, the smallest size of each row
    python benchmarks/common_case.py --device cuda --rows mlp,cnn,lm,fused_list   # both arms on a GPU, by the wall clock

Each figure is of a process of its own that has just begun. Its imports are timed by themselves, and all that comes after them
counts: executor, capture, training, results, shutdown, and processes it has started. Rounds alternate the two arms; figures are
the medians of the rounds, the ratio that of each round's. Final weights of both arms must have the same bits.

The plain loop seeds, loads and steps by itself and shares nothing with hydra_tune. Torch has one thread for an operator.

    mlp, counter   five layers of 64, batches from a list; with a counter in forward that the outputs depend on
    cnn            two convolutions with BatchNorm
    lm             a language model of 51 million parameters
    wide           eight MLPs of 512 on cpu:2, against the same pool on cpu:1
    loader0, loader2   a user's Dataset that augments by random numbers, with 0 and 2 workers
    optuna         a search of 16 trials, against stock Optuna
    fused_list, fused_dataset, fused_loader
                   sixteen of these MLPs fused, from a callable, a TensorDataset, and a Dataset with a DataLoader
    fused_list_again, fused_dataset_again
                   the same in a process that has fused such trials before
    bert, llama    until the first step of BERT-base, and of a Llama of 8 layers with LoRA, is over
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Of each row: sizes as (trials, steps), the measure, the goal for it over the plain loop's.
ROWS = {
    "mlp": (((1, 200), (8, 200), (1, 3000), (8, 3000)), "cpu", 1.10),
    "counter": (((1, 200), (8, 200), (1, 3000), (8, 3000)), "cpu", 1.10),
    "cnn": (((1, 200), (8, 200), (1, 3000), (8, 3000)), "cpu", 1.10),
    "lm": (((1, 6),), "cpu", 1.00),
    "wide": (((8, 200), (8, 1000)), "wall", 0.60),
    "loader0": (((1, 200), (8, 200), (1, 3000)), "wall", 1.10),
    "loader2": (((1, 200), (8, 200), (1, 3000)), "wall", 1.20),
    "optuna": (((16, 320),), "cpu", 1.10),
    "fused_list": (((16, 200), (16, 2000)), "cpu", 1 / 6),
    "fused_dataset": (((16, 200), (16, 2000)), "cpu", 1 / 10),
    "fused_loader": (((16, 200), (16, 2000)), "cpu", 1 / 2),
    "fused_list_again": (((16, 200),), "cpu", 1 / 2),
    "fused_dataset_again": (((16, 200),), "cpu", 1 / 2),
    "bert": (((1, 1),), "first", 1.10),
    "llama": (((1, 1),), "first", 1.10),
}
FIRST_SECONDS = 0.5  # beside a tenth of a step, for the first one


# The table.


def figures(row, arm, trials, steps, device):
    program = str(Path(__file__).with_name("common_case_arms.py"))
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, row, arm, str(trials), str(steps), str(time.monotonic()), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if done.returncode or not lines:
        raise SystemExit(f"{row} {trials}x{steps}, {arm}, failed:\n{done.stdout}{done.stderr}")
    return json.loads(lines[0].removeprefix("FIGURES "))


def seconds_of(measure, base, own):
    """The two figures that are compared: of the first step, what it takes beside building the model and half a second."""
    if measure == "first":
        return base["step"], max(0.0, own["first"] - base["build"] - FIRST_SECONDS)
    return base[measure], own[measure]


def same(row, base, own):
    """Whether the arms agree: to the last bit, or in the norms of fused trials' weights, which are equal up to rounding.

    Rounding in float32 grows with the steps, as these labels are random: to 1% of the norm in 2,000 steps. Searches agree as
    far as both trained a trial, since others' reports decide what is pruned.
    """
    if row.startswith("fused"):
        return all(abs(mine - other) <= 5e-2 * other for other, mine in zip(base["bits"], own["bits"], strict=True))
    if row != "optuna":
        return base["bits"] == own["bits"]
    return all(
        left[0] == right[0] and all(left[1][key] == right[1][key] for key in left[1].keys() & right[1].keys())
        for (_, left), (_, right) in zip(base["bits"], own["bits"], strict=True)
    )


def measured(row, trials, steps, rounds, device):
    _, measure, goal = ROWS[row]
    if device == "cuda" and measure == "cpu":
        measure = "wall"
    arms = ("pool", "pool2") if row == "wide" else ("plain", "pool")
    kept = []
    for number in range(rounds):
        taken = {arm: figures(row, arm, trials, steps, device) for arm in (arms if number % 2 == 0 else arms[::-1])}
        kept.append([taken[arm] for arm in arms])
    pairs = [seconds_of(measure, base, own) for base, own in kept]

    def middle(values):
        return statistics.median(list(values))

    return {
        "row": row,
        "trials": trials,
        "steps": steps,
        "measure": measure,
        "base": middle(base for base, _ in pairs),
        "own": middle(own for _, own in pairs),
        "ratio": middle(own / base for base, own in pairs),
        "goal": goal,
        "wall": [middle(base["wall"] for base, _ in kept), middle(own["wall"] for _, own in kept)],
        "cpu": [middle(base["cpu"] for base, _ in kept), middle(own["cpu"] for _, own in kept)],
        "import": [middle(base["import"] for base, _ in kept), middle(own["import"] for _, own in kept)],
        "same_bits": all(same(row, base, own) for base, own in kept),
        "rounds": rounds,
    }


def line(found):
    cells = [
        found["row"],
        f"{found['trials']} x {found['steps']}",
        {"wide": "wall, cpu:2 against cpu:1"}.get(found["row"], found["measure"]),
        f"{found['base']:.2f}",
        f"{found['own']:.2f}",
        f"{found['ratio']:.2f}x",
        f"<= {found['goal']:.2f}x",
        "yes" if found["ratio"] <= found["goal"] else "no",
        "same" if found["same_bits"] else "OTHER",
        " and ".join(f"{seconds:.1f}" for seconds in found["import"]),
    ]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", help="trials x steps, such as 8x200, in place of each row's own sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    size = None if options.size is None else tuple(int(part) for part in options.size.split("x"))
    print("| row | trials x steps | measure | base, s | pool, s | ratio | goal | reached | bits | imports, s |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    every = []
    for row in rows:
        sizes = [size] if size else ROWS[row][0][: 1 if options.quick else None]
        for trials, steps in sizes:
            every.append(measured(row, trials, steps, 1 if options.quick else options.rounds, options.device))
            print(line(every[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
