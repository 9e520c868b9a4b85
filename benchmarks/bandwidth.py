"""What is swapped and what is computed again, by the bandwidth of the link: a table for docs/results/planner.md.

    python benchmarks/bandwidth.py [cnn] [resnet] [vit] [bert] ... [--share 0.6]

Two sub-arrays of two trials each, in a share of what they need beside their static tensors with everything kept. No
clock decides: an operator takes a microsecond, and a nanosecond for each byte that it reads or makes; the graphs are real.
"""

import argparse

import torch
from mutwo_family import Family
from mutwo_models import MODELS

from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.passes.swap_recompute import planned
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of, copied_at

BYTES_PER_SECOND = (1e10, 1e9, 3e8, 2e8, 1e8, 5e7, 3e7, 2e7, 1e7, 3e6, 1e6)
WIDTH = 30


def counted(name):
    """A sub-array of two trials whose times are counted from bytes."""
    step = Family(name, "cpu", torch.device("cpu"), "adamw").step(2)
    sizes, reads, makes = step.seen.sizes, step.seen.reads, step.seen.makes
    seconds = {n.name: 1e-6 + 1e-9 * sum(map(sizes.__getitem__, (*reads[n.name], *makes[n.name]))) for n in step.ops}
    return array_of(name, step, GraphMeasurements(seconds))


def main():
    """Plan for each bandwidth and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "families",
        nargs="*",
        choices=[[], *(one for one in MODELS if "cpu" in MODELS[one])],
        help="all that are named; the CNN, if none is",
    )
    parser.add_argument("--share", type=float, default=0.6)
    given = parser.parse_args()
    for name in given.families or ["cnn"]:
        made = counted(name)
        print(f"{name}, {given.share:.0%} of what is needed with everything kept\n")
        print(f"{'MB/s':>7}  {'swapped':>10}  {'again':>10}  {'ms':>7}  swapped of what is not kept")
        for bandwidth in BYTES_PER_SECOND:
            pair = (copied_at(made, bandwidth),) * 2
            whole = undecided(pair, 1 << 60)
            rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
            schedule, _ = planned(undecided(pair, whole.static_bytes + int(given.share * rest)))
            fits = peak_of(schedule)[1].peak_bytes <= schedule.limit_bytes
            swapped = sum(made.maps[one].num_bytes for decided in schedule.decisions for one in decided.swaps)
            again = sum(made.maps[one].num_bytes for decided in schedule.decisions for one in decided.recomputes)
            share = swapped / max(swapped + again, 1)
            print(
                f"{bandwidth / 1e6:7g}  {swapped / 1024:6.0f} KiB  {again / 1024:6.0f} KiB  "
                f"{times_of(schedule, is_duplex=False).seconds * 1e3:7.2f}  {'█' * round(WIDTH * share):{WIDTH}} "
                f"{share:4.0%}{'' if fits else '  does not fit'}"
            )


if __name__ == "__main__":
    main()
