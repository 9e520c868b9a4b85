"""What the planner predicts against what is measured: seconds and peak of every plan that fits, and the choice of a run-off.

    python benchmarks/predicted.py [cnn] [resnet] [bert] [vit] [dlrm] [--share 1.0 0.8 0.6 0.4] [--rounds 5]

Four trials of a model of `mutwo_models.py` at the scale of a CPU, in shares of what two sub-arrays of two need at once beside
their static tensors with everything kept. All plans of the portfolio that fit and differ are run.

A machine that others have a part in changes its pace within a second, and a profile takes less than one. So there are
rounds: in each the sub-arrays are profiled anew, and then all plans make steps in turn; and the same few operators are timed
beside each pass of a profile and each step (`planner/profile/clock_drift.py`). `by the clock` is what the first
profiles predict, those that plans are made by, over the median of all that was measured as the clock has it: the
errors of profiler and timeline and the change of pace together. `at one pace` is what the profiles of a round predict
for the same plans, over what that round has measured at the pace of those profiles, of which the median over the
rounds is taken: the errors of profiler and timeline.

A line has the least and the most of these among all plans; bytes beside static tensors, measured by the tests' own tracker;
and the time of the plan that the run-off has settled on, and of the one that was predicted to be fastest, over the fastest.
Below each model is how far the profiles of the same sub-array differed between the rounds: the least and the most, over their
median.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from mutwo_choice import settled  # noqa: E402 - benchmarks/ is the script's folder
from mutwo_family import ENDLESS, Family  # noqa: E402
from mutwo_models import MODELS  # noqa: E402
from mutwo_runs import Runners, in_turn, raced  # noqa: E402

from hydra_tune.errors import BudgetError  # noqa: E402 - tests/ needs the path above
from hydra_tune.planner.cost.peak_memory import peak_of  # noqa: E402
from hydra_tune.planner.ir.plan_state import undecided  # noqa: E402
from hydra_tune.planner.profile.profiler import SubArrayProfiler  # noqa: E402
from hydra_tune.planner.search.autotune import key_of  # noqa: E402
from hydra_tune.planner.search.portfolio import Planner, PortfolioPlan  # noqa: E402
from hydra_tune.planner.search.tournament import LEAVES_AT, SpeedTournament  # noqa: E402
from tests.support.tracker import StorageTracker  # noqa: E402

TRIALS = 4
USUAL = ("cnn", "resnet", "bert", "vit", "dlrm")


@dataclass
class Case:
    """A model in a share of its memory.

    Attributes:
        share: of it.
        planner: by the first profiles.
        first: what those plan, by what it does.
        found: the fastest, by the run-off.
        members: all that are run: those of `first`.
        runners: of these.
        took: what a step of each took at the pace of the profiles, by round.
        clocks: the same by the clock.
        ratios: what the profiles of a round predict for each, over that.
    """

    share: float
    planner: Planner
    first: dict
    found: PortfolioPlan
    members: list
    runners: Runners
    took: list[list[float]] = field(default_factory=list)
    clocks: list[list[float]] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)

    def round(self, arrays, pace_seconds, steps):
        """Steps of all in turn, and what is predicted for them by arrays that were profiled just now, at that pace."""
        found = raced(self.runners, len(self.members), pace_seconds, 1, steps)
        self.took.append([one.seconds for one in found])
        self.clocks.append([one.clock_seconds for one in found])

        def seconds_of(part):
            return self.planner.timed(part, tuple(arrays[size] for size in part.sizes)).times.seconds

        predicted = [sum(map(seconds_of, one.parts)) for one in self.members]
        self.ratios.append([seconds / one.seconds for seconds, one in zip(predicted, found, strict=True)])

    @property
    def seconds(self):
        """Of a step of each, by all rounds."""
        race = SpeedTournament(range(len(self.members)), warm_ups=0, turns=len(self.took), leaves_at=float("inf"))
        for took in self.took:
            for seconds in took:
                race.took(seconds)
        return {key_of(one): race.seconds[number] for number, one in enumerate(self.members)}


def limits(family, shares):
    """The limits of some shares."""
    array = family.array(TRIALS // 2)
    whole = undecided((array, array), ENDLESS)
    beside = peak_of(whole)[1].peak_bytes - whole.static_bytes
    return [whole.static_bytes + int(share * beside) for share in shares]


def peaks(family, members):
    """Planned over measured bytes beside static tensors of the part of each that needs the most; tracked in a step of it."""
    runners, found = Runners(family, members), []
    for number, one in enumerate(members):
        place, part = max(enumerate(one.parts), key=lambda each: each[1].peak_bytes)
        run, segments = runners.part(number, place)
        tracker = StorageTracker()
        gc.collect()
        with tracker() as mode:
            mode._account.follow(runners.held(number, place))  # noqa: SLF001 - as the tests' own does; none is held here
            for segment in segments:
                run.segment(segment)
        static = part.schedule.static_bytes
        found.append((part.peak_bytes - static) / (tracker.peak_bytes[0] - static))
    runners.close()
    return found


def planned(family, limit, share, options):
    """What is run in a share; None where nothing fits, which is said."""
    planner = family.planner(limit)

    def measure(few):
        return [one.seconds for one in in_turn(family, few, options.warm_up, options.steps, LEAVES_AT)]

    portfolio = planner.portfolio(TRIALS)
    try:
        found = settled(planner, TRIALS, measure)
    except BudgetError as error:
        print(f"{family.name:8} {share:5.0%}  {error}", flush=True)
        return None
    first = {key_of(one): one for one in reversed(portfolio.members) if one.fits}
    members = list(first.values())
    return Case(share, planner, first, found, members, Runners(family, members))


def told_of(family, case):
    """A line of the table."""
    seconds = case.seconds
    rounds = {
        key_of(one): statistics.median(ratios[number] for ratios in case.ratios)
        for number, one in enumerate(case.members)
    }
    clocks = {
        key_of(one): statistics.median(clock[number] for clock in case.clocks)
        for number, one in enumerate(case.members)
    }
    first = [one.seconds / clocks[key] for key, one in case.first.items()]
    fastest = min(seconds.values())
    predicted = min(case.first.values(), key=lambda one: one.seconds)
    over = [seconds[key_of(one)] / fastest for one in (case.found, predicted)]
    columns = [told(first), told(rounds.values()), told(peaks(family, case.members))]
    print(
        f"{family.name:8} {case.share:5.0%} {len(case.members):5} {columns[0]:>12} {columns[1]:>12} "
        f"{columns[2]:>12} {over[0]:8.2f} {over[1]:9.2f}  {case.found.name}",
        flush=True,
    )


def told(ratios):
    """The least and the most."""
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


def compare(name, options):
    """All shares of a model, in rounds."""
    family = Family(name, "cpu", torch.device("cpu"), "adamw")
    found = [
        planned(family, limit, share, options)
        for share, limit in zip(options.share, limits(family, options.share), strict=True)
    ]
    cases = [one for one in found if one is not None]
    sizes = sorted({size for case in cases for one in case.members for part in one.parts for size in part.sizes})
    profiled = {size: [] for size in sizes}
    for _ in range(options.rounds):
        profiles = SubArrayProfiler()
        arrays = {size: profiles.array(str(size), family.step(size), family.device) for size in sizes}
        pace = profiles.pace_seconds(family.device)
        for size, array in arrays.items():
            profiled[size].append((array.seconds, array.seconds / pace))
        for case in cases:
            case.round(arrays, pace, options.turns)
    for case in cases:
        told_of(family, case)
        case.runners.close()
    for size, each in profiled.items():
        usual = statistics.median(seconds for seconds, _ in each)
        by_clock, at_pace = (
            told([one / statistics.median(found) for one in found]) for found in zip(*each, strict=True)
        )
        print(
            f"{name:8} a step of {size}: {usual * 1e3:.1f} ms; its profiles {by_clock} times that, at one pace {at_pace}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="of " + ", ".join(MODELS) + "; else " + " ".join(USUAL))
    parser.add_argument("--share", nargs="+", type=float, default=[1.0, 0.8, 0.6, 0.4])
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9, help="of each plan in the run-off")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--turns", type=int, default=3, help="steps of each plan in a round, after one that does not count"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "model    limit plans by the clock  at one pace         peak   chosen predicted",
        flush=True,
    )
    for name in options.models or USUAL:
        compare(name, options)


if __name__ == "__main__":
    main()
