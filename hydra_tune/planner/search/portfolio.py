"""Portfolio: several plans for a device's trials within its memory; the best plan is the fastest that fits.

The paper has a single way, a greedy choice over all partitions (§3.2, step 5). The greedy choice is fragile: times of a
few microseconds flip the result, and the choice can miss a limit that a simpler plan meets. So the greedy choice is one
of several plans, and the same models of time and memory judge every plan:

* `fits, one after another`: sub-arrays as large as fit with everything kept, each run alone (as HFTA does); single
  trials where none fits;
* `full fusion`: all trials in a single sub-array, in the best of the ways below (Capuchin on HFTA);
* for the fastest partition among the sub-arrays and pairs that the search has planned: `kept`, `no interleaving`, `swaps
  alone`, `recomputations alone`, `min-cut` (recomputations by a minimum cut with a budget), and `interleaved`, the paper's
  way;
* `each pair's best` of these ways.

Sub-arrays that do not run are not on the device: their static tensors are spilled. The predicted times do not include
the time to spill and load static tensors.

`StepPlanner` (`fusion/runtime/step_planner.py`) plans the ways of a group, or of two groups in turn, before their
planned steps run, and once more where a measured step has corrected the profiles; a `StepPlanner` plans no partitions
here. Only `figures.py` and benchmarks plan a whole portfolio. `autotune.py` reads a `PortfolioPlan` for the key of its
decisions.

Note: a `Planner` has no lock, and belongs to the thread that made the `Planner`. The module must not know groups or devices:
steps are counts and profiles here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from hydra_tune.errors import BudgetError
from hydra_tune.planner.cost.latency import StepTimeBreakdown, times_of
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import SubArraySchedule, undecided
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.min_cut import min_cut_planned
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.search.partitions import Part, PartitionSearch, cheapest
from hydra_tune.quantities import format_bytes, format_bytes_up

MARGIN = 0.02
"""Share of a limit left free by plans, for rounding by allocators and for memory that nodes take beyond their profile."""

_WAYS = {
    "no interleaving": AllowedPlanActions(interleaves=False),
    "swaps alone": AllowedPlanActions(recomputes=False),
    "recomputations alone": AllowedPlanActions(swaps=False),
    "interleaved": AllowedPlanActions(),
}


@dataclass(frozen=True, slots=True)
class SubArrayPlan:
    """Sub-arrays that run together, and how.

    Attributes:
        sizes: number of trials in each sub-array.
        times: of a step of all the sub-arrays.
        peak_bytes: most memory that the segments in turn need; the first forward and the last backward of a pair, which
            run alone, are not counted.
    """

    sizes: tuple[int, ...]
    way: str
    schedule: SubArraySchedule
    times: StepTimeBreakdown
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PortfolioPlan:
    """A plan of the portfolio for all trials.

    Attributes:
        parts: run one after the other in each step of all trials.
        limit_bytes: the limit that `fits` compares the peak with; in a portfolio, the device's without `MARGIN`.
    """

    name: str
    parts: tuple[SubArrayPlan, ...]
    limit_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a step of all trials."""
        return sum(part.times.seconds for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of the parts."""
        return max(part.peak_bytes for part in self.parts)

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, buffers, optimizer state and batches of the part that needs the most memory."""
        return max(self.parts, key=lambda part: part.peak_bytes).schedule.static_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class Portfolio:
    """All plans of a portfolio.

    Attributes:
        members: the fastest that fits first, plans that do not fit last.
    """

    members: tuple[PortfolioPlan, ...]

    @property
    def best(self) -> PortfolioPlan:
        """The fastest plan that fits.

        Raises:
            BudgetError: no plan fits; `enough_bytes` is the memory with which the smallest of the plans would.
        """
        if self.members[0].fits:
            return self.members[0]
        least = min(self.members, key=lambda member: member.peak_bytes)
        enough = limit_for(least.peak_bytes)
        raise BudgetError(
            f"no plan of {sum(sum(part.sizes) for part in least.parts)} fused trials needs less than "
            f"{format_bytes(least.peak_bytes)} at once ({least.name}), of which {format_bytes(least.static_bytes)} are "
            f"static tensors, which no plan moves, and the limit is "
            f"{format_bytes(least.limit_bytes)}; give the device {format_bytes_up(enough)} or more, or fuse fewer",
            enough_bytes=enough,
        )


def limit_for(peak_bytes: int) -> int:
    """Return a memory limit, about a byte above the smallest, under which a plan with this peak leaves `MARGIN` free."""
    return ceil(peak_bytes / (1 - MARGIN)) + 1  # and a byte for the rounding of the limit's share


@dataclass(slots=True, kw_only=True)
class Planner:
    """Plans the trials of a device, and keeps profiles and parts for the next call of the same planner.

    Attributes:
        array: number of trials -> profiled sub-array; called once for each number.
        limit_bytes: of the device's memory.
        is_duplex: whether copies in both directions go side by side.
        max_size: most trials in a sub-array; None: any number.
    """

    array: Callable[[int], SubArrayProfile]
    limit_bytes: int
    is_duplex: bool = True
    max_size: int | None = None
    _arrays: dict[int, SubArrayProfile] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], dict[str, SubArrayPlan]] = field(default_factory=dict)

    def portfolio(self, num_trials: int) -> Portfolio:
        """Plan trials in every way."""
        members: list[PortfolioPlan] = []
        if self.max_size is None or num_trials <= self.max_size:
            members.append(self._member("full fusion", [self.alone(num_trials)]))
        members.append(self._kept_one_after_another(num_trials))
        members += self._paired(num_trials, members)
        return Portfolio(tuple(sorted(members, key=_rank)))

    def alone(self, size: int) -> SubArrayPlan:
        """Return the best way to run a single sub-array, or the way that needs the least memory if none fits."""
        return self.best(self._pair((size,)))

    def ways(self, sizes: tuple[int, ...], arrays: tuple[SubArrayProfile, ...]) -> dict[str, SubArrayPlan]:
        """Return all ways, by name, to run a single sub-array, or two in turn, possibly of different kinds."""
        kept_schedule = undecided(arrays, self._limit)
        plans = {"kept": self._part(sizes, "kept", kept_schedule)}
        for way, policy in _WAYS.items():
            schedule, _ = planned(kept_schedule, replace(policy, is_duplex=self.is_duplex))
            plans[way] = self._part(sizes, way, schedule)
        plans["min-cut"] = self._part(sizes, "min-cut", min_cut_planned(kept_schedule))
        return plans

    def timed(self, part: SubArrayPlan, arrays: tuple[SubArrayProfile, ...]) -> SubArrayPlan:
        """Return a part with the predictions of other arrays of the same trials."""
        return self._part(part.sizes, part.way, part.schedule.timed_by(arrays))

    def best(self, ways: Mapping[str, SubArrayPlan]) -> SubArrayPlan:
        """Return the fastest way that fits, or the way that needs the least memory."""
        fitting = [part for part in ways.values() if part.peak_bytes <= self._limit]
        if fitting:
            return min(fitting, key=lambda part: part.times.seconds)
        return min(ways.values(), key=lambda part: part.peak_bytes)

    def kept(self, size: int) -> SubArrayPlan:
        """Return a single sub-array with everything kept, whether or not the sub-array fits."""
        return self._part((size,), "kept", undecided((self._of(size),), self._limit))

    def _of(self, size: int) -> SubArrayProfile:
        if size not in self._arrays:
            self._arrays[size] = self.array(size)
        return self._arrays[size]

    def _paired(self, num_trials: int, others: Sequence[PortfolioPlan]) -> list[PortfolioPlan]:
        """Return the best plan of each way, and of the best ways, over partitions that may be faster than the known plans."""
        search = PartitionSearch(num_trials, self._at_least)
        search.below = min((one.seconds for one in others if one.fits), default=inf)
        halves = ((num_trials + 1) // 2, num_trials // 2)
        part: Part | None = halves  # planned even if the search would not, for people to compare with
        if num_trials > 1:  # not a partition, but full fusion
            full = next((one for one in others if len(one.parts) == 1), None)
            search.refused((num_trials,), 1.0 if full is None else min(1.0, self._limit / full.peak_bytes))
        if num_trials == 1 or self._at_least(halves[0]) == inf:
            part = search.next
        tried: dict[Part, dict[str, SubArrayPlan]] = {}
        while part is not None:
            tried[part] = self._pair(part)
            best_plan = self.best(tried[part])
            if best_plan.peak_bytes <= self._limit:
                search.planned(part, best_plan.times.seconds)
            else:
                search.refused(part, self._limit / best_plan.peak_bytes)
            part = search.next
        # Where nothing fits, single trials tell the least memory that any plan needs.
        least_parts: tuple[Part, ...] = ((1,),) * num_trials
        if not search.best:
            tried[1,] = self._pair((1,))
        usual_parts = search.best or ((halves,) if halves in tried else least_parts)
        names = ("kept", *_WAYS, "min-cut")
        plans = [self._divided(name, num_trials, _of_way(tried, name), usual_parts) for name in names]
        best_plans = {part: self.best(ways) for part, ways in tried.items()}
        return [*plans, self._divided("each pair's best", num_trials, best_plans, search.best or least_parts)]

    def _divided(
        self, name: str, num_trials: int, tried: Mapping[Part, SubArrayPlan], otherwise: tuple[Part, ...]
    ) -> PortfolioPlan:
        """Return the fastest partition into parts that fit; the parts `otherwise` if there is none."""

        def seconds(part: Part) -> float:
            return self._fitting_seconds(tried[part]) if part in tried else inf

        _, parts = cheapest(num_trials, seconds)
        return self._member(name, [tried[part] for part in parts or otherwise])

    def _at_least(self, size: int) -> float:
        is_wanted = self.max_size is None or size <= self.max_size
        return self._of(size).seconds if is_wanted else inf

    def _fitting_seconds(self, part: SubArrayPlan) -> float:
        return part.times.seconds if part.peak_bytes <= self._limit else inf

    def _pair(self, pair: tuple[int, ...]) -> dict[str, SubArrayPlan]:
        # Both orders of a pair share a plan.
        sizes = tuple(sorted(pair, reverse=True))
        if sizes not in self._parts:
            self._parts[sizes] = self.ways(sizes, tuple(self._of(size) for size in sizes))
        return self._parts[sizes]

    def _kept_one_after_another(self, num_trials: int) -> PortfolioPlan:
        """Put as many trials in each sub-array as fit, and the remaining trials in a last sub-array."""
        largest = 1
        most = num_trials if self.max_size is None else min(num_trials, self.max_size)
        for size in range(2, most + 1):
            # Memory grows with the size, so the first size that does not fit ends the search.
            if self.kept(size).peak_bytes > self._limit:
                break
            largest = size
        sizes = [largest] * (num_trials // largest) + ([num_trials % largest] if num_trials % largest else [])
        return self._member("fits, one after another", [self.kept(size) for size in sizes])

    def _part(self, sizes: tuple[int, ...], way: str, schedule: SubArraySchedule) -> SubArrayPlan:
        verify_schedule(schedule)
        return SubArrayPlan(
            sizes, way, schedule, times_of(schedule, is_duplex=self.is_duplex), peak_of(schedule)[1].peak_bytes
        )

    def _member(self, name: str, parts: Sequence[SubArrayPlan]) -> PortfolioPlan:
        return PortfolioPlan(name, tuple(parts), self._limit)

    @property
    def _limit(self) -> int:
        return int(self.limit_bytes * (1 - MARGIN))


def _of_way(tried: Mapping[Part, Mapping[str, SubArrayPlan]], name: str) -> dict[Part, SubArrayPlan]:
    return {part: ways[name] for part, ways in tried.items()}


def _rank(member: PortfolioPlan) -> tuple[bool, float]:
    return (not member.fits, member.seconds if member.fits else member.peak_bytes)
