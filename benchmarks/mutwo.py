"""μ-TWO's comparison (Figures 7 and 8): fusing what fits, fusing everything in less memory, and planned pairs.

    python benchmarks/mutwo.py [vit] [mobilenet] ... [--count 2 4 8] [--demand 2 6] [--json FILE] [--markdown FILE]
    python benchmarks/mutwo.py --device cuda            # ViT and BERT of the paper's sizes, in less than 8 minutes
    python benchmarks/mutwo.py --smallest               # the least memory that any plan of a pair needs

For each model and number of trials a limit is set that full fusion with everything kept would need `demand` times.
All members of the portfolio are planned for it, and those that fit are run: `fits, one after another` is as HFTA, `full
fusion` as Capuchin on HFTA. Milliseconds of a step of all trials, predicted and measured; pairs are measured at their pace,
without the first forward and the last backward. Speedups are over these two; hours are of 10,000 steps. Where no plan meets a
limit, the smallest that one does is named, and compared at instead. Of each case there is a line that begins with `row:`.

On a CPU the chosen one is the fastest measured plan; then all members take turns, so that all find the machine as it is, on
one intra-op thread and one that copies. On a GPU, where their tensors would not fit together, only the chosen one and those
two are run, one after the other, in memory that is theirs alone; what they allocate at most is printed beside what was
planned. Static tensors of sub-arrays that do not run are not counted, and nothing is spilled between parts that run one after
the other.
"""

import argparse
import json
import sys
import time
import traceback
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed

import torch
from mutwo_choice import settled
from mutwo_family import OPTIMIZERS, Family, bound_of, smallest
from mutwo_models import MODELS, SCALES
from mutwo_runs import in_turn, one_by_one
from mutwo_table import CAPUCHIN, HEADS, HFTA, Ran, Row, Table

from hydra_tune.errors import UnfusableError
from hydra_tune.planner.search.autotune import key_of
from hydra_tune.planner.search.tournament import LEAVES_AT
from hydra_tune.quantities import format_bytes

ROOM = 0.02  # beyond the smallest limit that a plan meets, where a demand is beyond it
NOT_PLANNED = "not planned"
SETTLING = 0.4  # of a case's seconds of measuring: each round of the run-off
ON_GPU = ((4, 2.0, None), (6, 6.0, 2))  # trials, demand, the most trials in a sub-array: what there is time to plan


def compare(family, row, options):
    """Plan and measure a case, and fill its row."""
    begun = time.monotonic()
    needs = family.needs(row.trials)
    set_limit(family, row, int(needs / row.wanted_demand))
    planner, members = planned(family, row)
    if not members:  # what can be run is beside it
        at_least = min(one.peak_bytes for one in planner.portfolio(row.trials).members)
        row.why = f"no plan was found; the smallest needs {format_bytes(at_least)}, at which plans are compared"
        row.limit_bytes = int(at_least * (1 + ROOM))
        planner, members = planned(family, row)
    if not members:
        row.why += "; none was found there either"
        print(row.why, flush=True)
        return
    row.demand = needs / row.limit_bytes
    row.held = max(sum(part.sizes) for one in members for part in one.parts)
    print(f"trials on the device at once: {row.kept} fused with everything kept, up to {row.held} in these plans")
    if family.device.type == "cuda":
        members = [one for one in members if one is members[0] or one.name in (HFTA, CAPUCHIN)]
        found = one_by_one(family, members, options.warm_up, options.warm_seconds, options.steps)
        chosen = members[0]
    else:
        members, found, chosen = compare_on_cpu(family, row, planner, members, options)
    fill(row, members, found, chosen)
    row.taken_seconds += time.monotonic() - begun
    report(row)


def set_limit(family, row, limit):
    """The limit of a case: what was asked for, unless it is known that no plan meets it."""
    bound, why = bound_of(family, row.trials, row.max_size)
    row.limit_bytes = limit
    if bound > limit:
        row.limit_bytes = int(bound * (1 + ROOM))
        needed = f"{why}, {format_bytes(bound)} in all"
        row.why = f"no plan needs as little as {format_bytes(limit)}: {needed}, at which plans are compared"


def planned(family, row):
    """The planner of a row's limit, and the members of its portfolio that fit."""
    start = time.process_time()
    planner = family.planner(row.limit_bytes, row.max_size)
    portfolio = planner.portfolio(row.trials)
    seconds = time.process_time() - start
    print(
        f"\n{family.name}, {row.trials} trials, demand {row.wanted_demand:g}, {format_bytes(row.limit_bytes)}; "
        f"planned in {seconds:.1f} s of CPU time"
    )
    if row.why:
        print(row.why)
    for one in portfolio.members:
        sizes = " + ".join(str(part.sizes) for part in one.parts)
        fits = "fits" if one.fits else "does not fit"
        print(
            f"{one.name:24} {sizes:28} {one.seconds * 1000:10.3f} ms {format_bytes(one.peak_bytes):>10}, {fits}",
            flush=True,
        )
    sizes = range(1, row.trials + 1)
    row.kept = sum(1 for _ in takewhile(lambda size: family.needs(size) <= row.limit_bytes, sizes))
    return planner, [one for one in portfolio.members if one.fits]


def fill(row, members, measured, chosen):
    """What was measured, into a row; members that do the same were measured once."""
    for one, found in zip(members, measured, strict=True):
        sizes = [list(part.sizes) for part in one.parts]
        times = one.seconds, found.seconds, found.clock_seconds
        row.ran.append(Ran(one.name, sizes, *times, one.peak_bytes, found.peak_bytes))
    row.chosen = [key_of(one) for one in members].index(key_of(chosen))
    for number, one in enumerate(members):
        row.names.setdefault(one.name, number)


def compare_on_cpu(family, row, planner, members, options):
    """The plan that a run-off settles on, and then all of them once more, measured for themselves; these, and the plan."""

    def measure(few):
        most = options.seconds * SETTLING
        return [one.seconds for one in in_turn(family, few, options.warm_up, options.steps, LEAVES_AT, most)]

    chosen = settled(planner, row.trials, measure)
    each: dict = {}
    for one in members:
        each.setdefault(key_of(one), one)
    row.names = {one.name: list(each).index(key_of(one)) for one in reversed(members)}
    ran = list(each.values())
    took = in_turn(family, ran, options.warm_up, options.steps, most_seconds=options.seconds * (1 - SETTLING))
    return ran, took, each[key_of(chosen)]


def say(row):
    """In a line for programs."""
    print("row: " + json.dumps(dict(zip(HEADS, row.cells(), strict=True))), flush=True)


def report(row):
    """A line of each that was run; how far the chosen one is from the fastest; and all that counts in one line."""
    print(
        f"{'':36} predicted  measured  ratio  by the clock  over HFTA  over Capuchin  hours of 10,000  allocated/planned"
    )
    for one in row.ran:
        over = [f"{row.of(name).seconds / one.seconds:.2f}" if name in row.names else "-" for name in (HFTA, CAPUCHIN)]
        peak = "-" if one.allocated_bytes is None else f"{one.allocated_bytes / one.planned_bytes:.2f}"
        print(
            f"{one.name + (' (chosen)' if one is row.own else ''):36} {one.predicted_seconds * 1e3:9.2f} "
            f"{one.seconds * 1e3:9.2f} {one.predicted_seconds / one.seconds:6.2f} {one.clock_seconds * 1e3:13.2f} "
            f"{over[0]:>10} {over[1]:>14} {one.seconds / 0.36:16.3f} {peak:>18}"
        )
    predicted = min(row.ran, key=lambda one: one.predicted_seconds)
    for what, one in (("chosen", row.own), ("predicted to be the fastest", predicted)):
        print(f"the one {what} takes {one.seconds / row.fastest.seconds:.2f} times what the fastest takes")
    if HFTA not in row.names:
        print("not even one trial at a time fits with everything kept")
    print(f"{row.taken_seconds:.0f} s", flush=True)


def cases(options, *, on_gpu):
    """Numbers of trials, demands, and how many a sub-array may have."""
    if on_gpu and not options.count and not options.demand:
        return ON_GPU
    counts, demands = options.count or [2, 4, 8], options.demand or [2.0, 6.0]
    return [(count, demand, options.max_size) for count in counts for demand in demands]


def asked():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="of " + ", ".join(MODELS) + "; all, on a GPU vit and bert")
    parser.add_argument("--count", nargs="+", type=int, help="numbers of trials: 2 4 8; on a GPU 4 and 6")
    parser.add_argument("--demand", nargs="+", type=float, help="what all need, over what there is: 2 6")
    parser.add_argument("--max-size", type=int, help="the most trials in a sub-array")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--scale", choices=SCALES, help="table on a GPU, else cpu")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="sgd on a GPU, whose plans take less time, else adamw")
    parser.add_argument("--warm-up", type=int, help="steps that are not measured: 100 on a GPU, else 3")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="on a GPU no more of them than this takes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0, help="on a CPU no more steps of a case than these take")
    parser.add_argument("--minutes", type=float, help="nothing is begun after these: 6 on a GPU, else 13.5")
    parser.add_argument("--json", type=Path, help="keeps rows as they come; those that are there are not run again")
    parser.add_argument("--markdown", type=Path, help="the table, as it comes")
    parser.add_argument("--smallest", action="store_true", help="only tell the smallest limits")
    options = parser.parse_args()
    on_gpu = options.device.type == "cuda"
    if on_gpu and options.device.index is None:
        options.device = torch.device("cuda", 0)  # as tensors there name it
    options.scale = options.scale or ("table" if on_gpu else "cpu")
    options.optimizer = options.optimizer or ("sgd" if on_gpu else "adamw")
    options.warm_up = options.warm_up if options.warm_up is not None else 100 if on_gpu else 3
    options.minutes = options.minutes if options.minutes is not None else 6.0 if on_gpu else 13.5
    return options


def of_family(name, rows, options, table, ends):
    """Rows of one model; those that there is no time for are said to be missing."""
    begun, family = time.monotonic(), None
    for row in rows:
        if time.monotonic() > ends:
            print(
                f"\n{name}, {row.trials} trials, demand {row.wanted_demand:g}: not run, {options.minutes:g} minutes are over"
            )
            continue
        try:
            if family is None:
                family = Family(name, options.scale, options.device, options.optimizer)
                row.taken_seconds = time.monotonic() - begun
            compare(family, row, options)
        except (UnfusableError, torch.OutOfMemoryError) as error:
            traceback.print_exc()
            row.why = f"{NOT_PLANNED}: {error}"
            print(f"{name}: {row.why}", flush=True)
        table.add(row)
        say(row)


def main():
    options, begun = asked(), time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = options.device.type == "cuda"
    setting = {
        "device": torch.cuda.get_device_name(options.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "scale": options.scale,
        "optimizer": options.optimizer,
        "warm-up": options.warm_up,
        "steps": options.steps,
        "seconds": options.seconds,
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()), flush=True)
    names = ["vit", "bert"] if on_gpu else [name for name in MODELS if options.scale in MODELS[name]]
    if options.smallest:
        print(
            "pair of one trial each: static, with everything kept, smallest, bound, share, met, operator of the bound"
        )
        for name in options.models or names:
            try:
                smallest(Family(name, options.scale, options.device, options.optimizer))
            except UnfusableError as error:
                print(f"{name}: not planned: {error}", flush=True)
        return 0
    table = Table(setting, options.json, options.markdown)
    for row in table.rows:
        say(row)
    for name in options.models or names:
        rows = [Row(name, *case) for case in cases(options, on_gpu=on_gpu)]
        missing = [row for row in rows if not table.has(row)]
        of_family(name, missing, options, table, begun + options.minutes * 60)
    print(f"\n{table.markdown()}\n{time.monotonic() - begun:.0f} s", flush=True)
    return 1 if any(row.why.startswith(NOT_PLANNED) for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
