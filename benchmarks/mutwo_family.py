"""The sub-arrays of one of μ-TWO's models: graphs and profiles by size, and the least memory that plans of them can need."""

import sys
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed

import torch
from mutwo_least import least
from mutwo_models import model

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.runtime.task_profiles import TaskProfileCache
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.profile.profiler import SubArrayProfiler
from hydra_tune.planner.search.portfolio import MARGIN, Planner
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary

ENDLESS = 1 << 60
OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, lr=1e-3), "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9)}


class Family:
    """The sub-arrays of one model: graphs, profiles and arguments by size."""

    def __init__(self, name, scale, device, optimizer):
        made = model(name, scale)
        batch = made.draw()
        self.name, self.device = name, device
        host = CpuDevice(0, 1 << 40)
        library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 40, buffer_fraction=0.0, alignment=host.alignment))
        task = TrainTask(model=made.build, train=lambda: [batch], optimizer=OPTIMIZERS[optimizer], loss=made.loss)
        member = MemberTrial(task, library, host)
        with member.peek() as first_batches:
            wanted = first_batches["train"]
        prepared = GroupPlanFactory(library).of_member(member, wanted)
        self._profiles = SubArrayProfiler()
        self._arrays = TaskProfileCache(task, member.built(), prepared, wanted.leaves, library, self._profiles, device)
        self.array, self.step = cache(self._arrays.array), self._arrays.step
        host.close()

    @property
    def pace_seconds(self):
        """At which all profiles are told."""
        return self._profiles.pace_seconds(self.device)

    def needs(self, size):
        """Bytes of so many trials in one sub-array with everything kept."""
        return peak_of(undecided((self.array(size),), ENDLESS))[1].peak_bytes

    def planner(self, limit_bytes, max_size=None):
        """Of a limit that its plans may use to the last byte."""
        limit = int(limit_bytes / (1 - MARGIN)) + 1
        is_duplex = self.device.type == "cuda"
        return Planner(array=self.array, limit_bytes=limit, is_duplex=is_duplex, max_size=max_size)


def bound_of(family, num_trials, max_size):
    """Bytes that no plan is below, and what needs them: one trial with all kept, a pair, or all trials in one sub-array."""
    one = family.array(1)
    static = undecided((one,) * min(num_trials, 2), ENDLESS).static_bytes
    bound = least(one)
    found = [(family.needs(1), "one trial with everything kept is the least")]
    found.append(
        (
            static + bound.num_bytes,
            f"the least is {bound.op} of one trial in a pair, beside {format_bytes(static)} static",
        )
    )
    if max_size is None or num_trials <= max_size:
        every = family.array(num_trials)
        bound = least(every)
        found.append((every.static_bytes + bound.num_bytes, f"the least is {bound.op} of all in one sub-array"))
    return min(found)


def smallest(family):
    """The least that any plan of two sub-arrays of one trial needs, and whether some plan is found when that is the limit."""
    array = family.array(1)
    whole = undecided((array, array), ENDLESS)
    kept = peak_of(whole)[1].peak_bytes
    at_least = min(one.peak_bytes for one in pairs_of_two(family, 1))
    members = family.planner(at_least).portfolio(2).members
    found = min(max(part.peak_bytes for part in one.parts) for one in members)
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
