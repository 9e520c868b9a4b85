"""What the planner predicts against what is measured: seconds and peak of every plan that fits, and the choice of a run-off.

    python benchmarks/predicted.py [cnn] [resnet] [bert] [dlrm] [--share 1.0 0.8 0.6 0.4]

Four trials of a model of `mutwo_models.py` at the scale of a CPU, in a share of what two sub-arrays of two need at once beside
their static tensors with everything kept. All plans of the portfolio that fit and differ take turns, after warming up. A line
has the least and the most of predicted over measured: seconds of a step as the profile has them, seconds after what the
run-off has corrected, and bytes beside static tensors, measured by the tests' own tracker; then the time of the plan that the
run-off has settled on, and of the one that was predicted to be fastest, over the fastest.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from mutwo import ENDLESS, Family  # noqa: E402 - benchmarks/ is the script's folder
from mutwo_models import MODELS  # noqa: E402
from mutwo_runs import Runners, in_turn  # noqa: E402

from hydra_tune.errors import BudgetError  # noqa: E402 - tests/ needs the path above
from hydra_tune.fusion.planner.memory import peak_of  # noqa: E402
from hydra_tune.fusion.planner.replan import key_of, settled  # noqa: E402
from hydra_tune.fusion.planner.run_off import LEAVES_AT  # noqa: E402
from hydra_tune.fusion.planner.schedule import undecided  # noqa: E402
from tests.support.tracker import StorageTracker  # noqa: E402

TRIALS = 4


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


def compare(family, limit, share, options):
    planner = family.planner(limit)

    def measure(few):
        return [one.seconds for one in in_turn(family, few, options.warm_up, options.steps, LEAVES_AT)]

    portfolio = planner.portfolio(TRIALS)
    try:
        found = settled(planner, TRIALS, measure)
    except BudgetError as error:
        print(f"{family.name:8} {share:5.0%}  {error}", flush=True)
        return
    each = {key_of(one): one for one in reversed(portfolio.members) if one.fits}
    after = {key_of(one.member): one.member for one in found.trials}
    members = list({**each, **{key: one for key, one in after.items() if key not in each}}.values())
    took = dict(zip(map(key_of, members), in_turn(family, members, options.warm_up, options.steps), strict=True))
    seconds = {key: one.seconds for key, one in took.items()}
    first = [one.seconds / seconds[key] for key, one in each.items()]
    second = [one.seconds / seconds[key] for key, one in after.items()]
    fastest = min(seconds.values())
    over = [seconds[key_of(one)] / fastest for one in (found.member, portfolio.best)]
    columns = [told(first), told(second), told(peaks(family, members))]
    print(
        f"{family.name:8} {share:5.0%} {len(members):5} {columns[0]:>12} {len(found.corrections):9} {columns[1]:>12} "
        f"{columns[2]:>12} {over[0]:8.2f} {over[1]:9.2f}  {found.member.name}",
        flush=True,
    )


def told(ratios):
    """The least and the most."""
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="of " + ", ".join(MODELS) + "; else cnn resnet bert dlrm")
    parser.add_argument("--share", nargs="+", type=float, default=[1.0, 0.8, 0.6, 0.4])
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("model    limit plans      seconds corrected        after         peak   chosen predicted")
    for name in options.models or ["cnn", "resnet", "bert", "dlrm"]:
        family = Family(name, "cpu", torch.device("cpu"), "adamw")
        for share, limit in zip(options.share, limits(family, options.share), strict=True):
            compare(family, limit, share, options)


if __name__ == "__main__":
    main()
