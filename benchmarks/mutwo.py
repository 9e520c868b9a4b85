"""μ-TWO's comparison (Figures 7 and 8): fusing what fits, fusing everything in less memory, and planned pairs.

    python benchmarks/mutwo.py [vit] [mobilenet] ... [--count 2 4 8] [--demand 2 6]
    python benchmarks/mutwo.py --device cuda            # ViT and BERT of the paper's sizes, in less than 8 minutes
    python benchmarks/mutwo.py --smallest               # the least memory that any plan of a pair needs

For each model and number of trials a limit is set that full fusion with everything kept would need `demand` times.
All members of the portfolio are planned for it, and those that fit are run: `fits, one after another` is as HFTA, `full
fusion` as Capuchin on HFTA. Milliseconds of a step of all trials, predicted and measured; pairs are measured at their pace,
without the first forward and the last backward. Speedups are over these two; hours are of 10,000 steps. Where no plan meets a
limit, the smallest that one does is named, and compared at instead. Of each case there is a line that begins with `row:`.

On a CPU the chosen one is what a run-off of the best few settles on, after planning again where times are off by more than a
fifth; then all members take turns, so that all find the machine as it is, on one intra-op thread and one that copies. On a
GPU, where their tensors would not fit together, only the chosen one and those two are run, one after the other, in memory that
is theirs alone; what they allocate at most is printed beside what was planned. Static tensors of sub-arrays that do not run are
not counted, and nothing is spilled between parts that run one after the other.
"""

import argparse
import sys
import time
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed

import torch
from mutwo_models import MODELS, SCALES, model
from mutwo_runs import in_turn, one_by_one

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.member import Member
from hydra_tune.fusion.planner.least import least
from hydra_tune.fusion.planner.memory import peak_of
from hydra_tune.fusion.planner.of_task import TaskArrays
from hydra_tune.fusion.planner.portfolio import MARGIN, Planner
from hydra_tune.fusion.planner.profiler import Profiles
from hydra_tune.fusion.planner.replan import key_of, settled
from hydra_tune.fusion.planner.run_off import LEAVES_AT
from hydra_tune.fusion.planner.schedule import undecided
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.budget import Budget
from hydra_tune.shard.library import PlanLibrary

HFTA, CAPUCHIN = "fits, one after another", "full fusion"
ENDLESS = 1 << 60
ROOM = 0.02  # beyond the smallest limit that a plan meets, where a demand is beyond it
OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, lr=1e-3), "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9)}
ON_GPU = ((4, 2.0, None), (6, 6.0, 2))  # trials, demand, the most trials in a sub-array: what there is time to plan


class Family:
    """The sub-arrays of one model: graphs, profiles and arguments by size."""

    def __init__(self, name, scale, device, optimizer):
        made = model(name, scale)
        batch = made.draw()
        self.name, self.device = name, device
        host = CpuDevice(0, 1 << 40)
        library = PlanLibrary(Budget(budget_bytes=1 << 40, buffer_fraction=0.0, alignment=host.alignment))
        task = TrainTask(model=made.build, train=lambda: [batch], optimizer=OPTIMIZERS[optimizer], loss=made.loss)
        member = Member(task, library, host)
        wanted = member.peek()["train"]
        prepared = GroupPlans(library).of_member(member, wanted)
        self._arrays = TaskArrays(task, member.built(), prepared, wanted.leaves, library, Profiles(), device)
        self.array, self.step = cache(self._arrays.array), self._arrays.step
        host.close()

    def needs(self, size):
        """Bytes of so many trials in one sub-array with everything kept."""
        return peak_of(undecided((self.array(size),), ENDLESS))[1].peak_bytes

    def planner(self, limit_bytes, max_size=None):
        """Of a limit that its plans may use to the last byte."""
        limit = int(limit_bytes / (1 - MARGIN)) + 1
        is_duplex = self.device.type == "cuda"
        return Planner(array=self.array, limit_bytes=limit, is_duplex=is_duplex, max_size=max_size)


def compare(family, num_trials, demand, max_size, options, *, is_given=True):
    limit = int(family.needs(num_trials) / demand)
    start = time.process_time()
    planner = family.planner(limit, max_size)
    portfolio = planner.portfolio(num_trials)
    seconds = time.process_time() - start
    print(
        f"\n{family.name}, {num_trials} trials, demand {demand:g} x {format_bytes(limit)}; "
        f"planned in {seconds:.1f} s of CPU time"
    )
    print(portfolio.table(), flush=True)
    members = [one for one in portfolio.members if one.fits]
    if not members:
        at_least = min(one.peak_bytes for one in portfolio.members)
        can_be = family.needs(num_trials) / at_least
        print(
            f"no plan fits: the smallest needs {format_bytes(at_least)}, which is a demand of {can_be:.2f}", flush=True
        )
        if is_given:  # what can be run is beside it
            compare(family, num_trials, can_be * (1 - ROOM), max_size, options, is_given=False)
        return
    held = max(sum(part.sizes) for one in members for part in one.parts)
    kept = max((size for size in range(1, num_trials + 1) if family.needs(size) <= limit), default=0)
    title = f"{family.name}, {num_trials} trials, demand {demand:.2f}, {format_bytes(limit)}"
    print(f"trials on the device at once: {kept} fused with everything kept, up to {held} in these plans")
    if family.device.type == "cuda":
        members = [one for one in members if one is members[0] or one.name in (HFTA, CAPUCHIN)]
        found = one_by_one(family, members, options.warm_up, options.warm_seconds, options.steps)
        report(members, found, members[0])
        row(title, members, found, members[0])
    else:
        row(title, *compare_on_cpu(family, num_trials, planner, members, options))


def row(title, members, measured, chosen):
    """All that counts of a case in one line."""
    took = {one.name: found.seconds * 1e3 for one, found in zip(reversed(members), reversed(measured), strict=True)}
    told = [f"{name} {took[name]:.1f} ms" if name in took else f"{name} does not fit" for name in (HFTA, CAPUCHIN)]
    own = next(
        found.seconds * 1e3 for one, found in zip(members, measured, strict=True) if key_of(one) == key_of(chosen)
    )
    told.append(
        f"chosen {own:.1f} ms ({chosen.name})" + (f", {took[HFTA] / own:.2f} over HFTA" if HFTA in took else "")
    )
    fastest = min(took, key=took.__getitem__)
    print(f"row: {title}: {'; '.join(told)}; fastest {took[fastest]:.1f} ms ({fastest})", flush=True)


def compare_on_cpu(family, num_trials, planner, members, options):
    """The plan that a run-off settles on, and then all of them once more, measured for themselves; these, and the plan."""

    def measure(few):
        return [one.seconds for one in in_turn(family, few, options.warm_up, options.steps, LEAVES_AT)]

    found = settled(planner, num_trials, measure)
    for one in found.corrections:
        compute = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in sorted(one.compute.items()))
        print(
            f"planned again: operators take {compute} (others {one.others:.2f}) times what was profiled, "
            f"a swap {one.swap_seconds * 1e6:+.0f} us"
        )
    each: dict = {}
    for one in (*members, *(trial.member for trial in found.trials)):
        each.setdefault(key_of(one), one)
    each = list(each.values())
    took = in_turn(family, each, options.warm_up, options.steps, most_seconds=options.seconds)
    report(each, took, found.member, members[0])
    return each, took, found.member


def report(members, measured, chosen, predicted=None):
    """A row of each; how far the chosen one is from the fastest, and the one that was predicted to be."""
    print(f"{'':36} predicted  measured  ratio  over HFTA  over Capuchin  hours of 10,000  allocated/planned")
    took = {one.name: found for one, found in zip(reversed(members), reversed(measured), strict=True)}
    for one, found in zip(members, measured, strict=True):
        is_chosen = key_of(one) == key_of(chosen)
        over = [f"{took[name].seconds / found.seconds:.2f}" if name in took else "-" for name in (HFTA, CAPUCHIN)]
        peak = "-" if found.peak_bytes is None else f"{found.peak_bytes / one.peak_bytes:.2f}"
        print(
            f"{one.name + (' (chosen)' if is_chosen else ''):36} {one.seconds * 1e3:9.2f} {found.seconds * 1e3:9.2f} "
            f"{one.seconds / found.seconds:6.2f} {over[0]:>10} {over[1]:>14} {found.seconds / 0.36:15.3f} {peak:>18}",
            flush=True,
        )
    fastest = min(found.seconds for found in measured)
    for what, wanted in (("chosen", chosen), ("predicted to be the fastest", predicted)):
        for one, found in zip(members, measured, strict=True):
            if wanted is not None and key_of(one) == key_of(wanted):
                print(f"the one {what} takes {found.seconds / fastest:.2f} times what the fastest takes")
    if HFTA not in took:
        print("not even one trial at a time fits with everything kept")


def smallest(family):
    """The least that any plan of two sub-arrays of one trial needs, and whether it is found when that is the limit."""
    array = family.array(1)
    whole = undecided((array, array), ENDLESS)
    kept = peak_of(whole)[1].peak_bytes
    at_least = min(one.peak_bytes for one in pairs_of_two(family, 1))
    found = min(one.peak_bytes for one in pairs_of_two(family, at_least))
    share = (at_least - whole.static_bytes) / (kept - whole.static_bytes)
    met = "yes" if found <= at_least else f"no: {format_bytes(found)}"
    bound = least(array)
    sizes = map(format_bytes, (whole.static_bytes, kept, at_least, whole.static_bytes + bound.num_bytes))
    print(
        ("{:10} " + "{:>11} " * 4 + "{:>6}  {:4} {}").format(family.name, *sizes, f"{share:.0%}", met, bound.op),
        flush=True,
    )


def pairs_of_two(family, limit_bytes):
    """Parts of two trials that are run in turn, planned for a limit."""
    members = family.planner(limit_bytes).portfolio(2).members
    return [part for one in members for part in one.parts if part.sizes == (1, 1)]


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
    parser.add_argument("--seconds", type=float, default=15.0, help="on a CPU no more steps of a case than these take")
    parser.add_argument("--minutes", type=float, default=6.0, help="on a GPU nothing is begun after these")
    parser.add_argument("--smallest", action="store_true", help="only tell the smallest limits")
    return parser.parse_args()


def told(name, action):
    """Do something, or say why no plan is made of that model."""
    try:
        action()
    except (UnfusableError, torch.OutOfMemoryError) as error:
        print(f"{name}: not planned: {error}", flush=True)


def main():
    options, begun = asked(), time.monotonic()
    on_gpu = options.device.type == "cuda"
    scale = options.scale or ("table" if on_gpu else "cpu")
    optimizer = options.optimizer or ("sgd" if on_gpu else "adamw")
    options.warm_up = options.warm_up if options.warm_up is not None else 100 if on_gpu else 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on = torch.cuda.get_device_name(options.device) if on_gpu else "cpu"
    print(f"device: {on}, torch {torch.__version__}, {scale}, {optimizer}", flush=True)
    if options.smallest:
        print(
            "pair of one trial each: static, with everything kept, smallest, bound, share, met, operator of the bound"
        )
    names = ["vit", "bert"] if on_gpu else [name for name in MODELS if scale in MODELS[name]]
    for name in options.models or names:
        family = Family(name, scale, options.device, optimizer)
        if options.smallest:
            told(name, partial(smallest, family))
            continue
        for num_trials, demand, max_size in cases(options, on_gpu=on_gpu):
            if on_gpu and time.monotonic() - begun > options.minutes * 60:
                print(
                    f"\n{name}, {num_trials} trials, demand {demand:g}: not run, {options.minutes:g} minutes are over"
                )
            else:
                told(name, partial(compare, family, num_trials, demand, max_size, options))


if __name__ == "__main__":
    main()
