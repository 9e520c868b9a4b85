"""Two trials in turn on a slow link, with the forward of each interleaved into the backward of the other, and without.

    python benchmarks/interleaving.py [--model tuned] [--scale large] [--link 400MB/s] [--share 0.5] [--turns 15]

One CPU device behind a simulated link, as of a pool with `link_bandwidth`: one copy at a time, both directions together.
The pair has a share of the memory that it needs beside its static tensors with everything kept. All ways of the portfolio
that fit make steps in turns, and so does swapping alone without interleaving. Milliseconds of a step of both trials: as
predicted, in brackets the waits for copies among them; and measured, CPU time of the computing thread with its waits for
copies, which leaves out what else the machine does.
"""

import argparse
import statistics

import torch
from mutwo_family import ENDLESS, Family
from mutwo_models import MODELS
from mutwo_runs import Runners

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware.discovery import parse_bandwidth
from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.profile.profiler import over_link
from hydra_tune.planner.search.autotune import key_of
from hydra_tune.planner.search.portfolio import Planner, PortfolioPlan, SubArrayPlan, limit_for
from hydra_tune.planner.search.tournament import SpeedTournament
from hydra_tune.quantities import format_bytes


def ways_of(array, share):
    """The limit, and the ways that fit it; ways that do the same are there once."""
    arrays = (array, array)
    whole = undecided(arrays, ENDLESS)
    limit = whole.static_bytes + int(share * (peak_of(whole)[1].peak_bytes - whole.static_bytes))
    ways = Planner(array=lambda _: array, limit_bytes=limit_for(limit), is_duplex=False).ways((1, 1), arrays)
    still, _ = planned(
        undecided(arrays, limit), AllowedPlanActions(recomputes=False, interleaves=False, is_duplex=False)
    )
    name = "swaps alone, no interleaving"
    ways[name] = SubArrayPlan((1, 1), name, still, times_of(still, is_duplex=False), peak_of(still)[1].peak_bytes)
    seen = {}
    for way, part in ways.items():
        if part.peak_bytes <= limit:
            seen.setdefault(key_of(PortfolioPlan(way, (part,), limit)), (way, part))
    return limit, dict(seen.values())


def main():
    """Plan, run in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tuned")
    parser.add_argument("--scale", default="large")
    parser.add_argument("--link", default="400MB/s")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = CpuDevice(0, 1 << 40, parse_bandwidth(given.link))
    family = Family(given.model, given.scale, torch.device("cpu"), "adamw")
    limit, ways = ways_of(over_link(family.array(1), device.bandwidth), given.share)
    runners = Runners(family, [PortfolioPlan(way, (part,), limit) for way, part in ways.items()], device.link)
    race = SpeedTournament(range(len(ways)), warm_ups=2, turns=given.turns, leaves_at=float("inf"))
    measured = [[] for _ in ways]
    while (number := race.next) is not None:
        run, _ = runners.part(number, 0)
        before = run.seconds
        runners.step(number)
        race.took(run.seconds - before)
        measured[number].append(run.seconds - before)
    runners.close()
    device.close()
    print(f"two {given.model} ({given.scale}) in {format_bytes(limit)}, a link of {given.link}\n")
    print(f"{'':30} {'predicted':>18}  {'measured':>8}  half of all between  interleaved  swapped")
    for number, (way, part) in enumerate(ways.items()):
        decisions = part.schedule.decisions
        swapped = sum(
            array.sizes[one]
            for array, decided in zip(part.schedule.arrays, decisions, strict=True)
            for one in decided.swaps
        )
        low, _, high = statistics.quantiles(measured[number][2:], n=4)
        print(
            f"{way:30} {part.times.seconds * 1e3:9.1f} ({part.times.stall * 1e3:5.1f})  {race.seconds[number] * 1e3:8.1f}  "
            f"{low * 1e3:7.1f} and {high * 1e3:5.1f}    {sum(len(one.slots) for one in decisions):11}"
            f"  {format_bytes(swapped):>8}"
        )


if __name__ == "__main__":
    main()
