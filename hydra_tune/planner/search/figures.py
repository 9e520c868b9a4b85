"""Data of the paper's Figures 3 and 9 for a device's trials: the memory of a step, and the cost of using less.

Figure 3: how long feature maps lie idle, the memory over a step, and the peak against the number of fused trials.
Figure 9: the seconds that each way of the portfolio computes, recomputes, waits and hides, and its memory.

`pool/dry_run/step_profiles.py` computes the figures for `HydraExecutor.plan(profile=...)` and `hydra-tune plan
--profile`, once for each kind and number of trials. `pool/dry_run/fusion_report.py` puts the figures into its report,
and `cli/dry_run/plan_figures.py` prints the figures. Nothing in training reads the figures. The module must not know
groups or devices: steps are counts and profiles here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite

from hydra_tune.planner.cost.latency import StepTimeBreakdown
from hydra_tune.planner.cost.peak_memory import curve, peak_of
from hydra_tune.planner.ir.instructions import Instruction
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule, undecided
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.search.portfolio import MARGIN, Planner, PortfolioPlan

SHARE = 0.6
"""Memory for comparing ways where all trials fit with everything kept: this share of their memory beside static tensors."""

_PAPER = {
    "fits, one after another": "HFTA",
    "full fusion": "Capuchin on HFTA",
    "no interleaving": "μ-TWO without its multiplexer",
    "swaps alone": "μ-TWO, swaps alone",
    "recomputations alone": "μ-TWO, recomputations alone",
    "interleaved": "μ-TWO",
    "kept": "smaller sub-arrays, nothing moved",
}
_ALL_SIZES = 8  # up to so many trials, every number of trials has its peak
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleFeatureMap:
    """A feature map (Figure 3a).

    Attributes:
        name: of the storage, after the operator that makes it.
        inactive_seconds: between the last use in the forward and the first use in the backward.
        out_seconds: of a copy to the host; None if the map is never swapped.
        in_seconds: of the copy back; None if the map is never swapped.
        recompute_seconds: of computing the map again from kept maps; None if that is impossible.
    """

    name: str
    num_bytes: int
    inactive_seconds: float
    out_seconds: float | None
    in_seconds: float | None
    recompute_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurvePoint:
    """An operator of a step in which everything is kept (Figure 3b).

    Attributes:
        is_backward: whether the operator belongs to the backward, updates included.
        seconds: from the beginning of the step to the end of the operator.
        num_bytes: on the device while the operator runs, static tensors included.
    """

    name: str
    is_backward: bool
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPeak:
    """Trials fused into a single sub-array, with everything kept (Figure 3c).

    Attributes:
        static_bytes: of the trials' parameters, buffers, optimizer state and batches.
        peak_bytes: most memory that a step needs, static tensors included.
        seconds: of the operators of a step.
    """

    num_trials: int
    static_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSystem:
    """A way to train all trials (Figure 9); seconds are of a step of all trials.

    Attributes:
        name: in the portfolio.
        stands_for: name in the paper; "" where the paper has none.
        sub_arrays: number of trials of each sub-array; sub-arrays that run in turn, as a pair, are together.
        ways: how each pair runs.
        seconds: of computing, recomputing and stalls together.
        compute_seconds: of operators that any way runs.
        recompute_seconds: of operators that run again.
        stall_seconds: of waiting for copies, handing copies over, and making small copies.
        copy_seconds: of all copies.
        overlapped_seconds: of the copies' time that is hidden beside operators.
        peak_bytes: most memory that the system needs.
        fits: whether the peak is within the limit.
        is_chosen: whether the system is the fastest that fits.
    """

    name: str
    stands_for: str
    sub_arrays: tuple[tuple[int, ...], ...]
    ways: tuple[str, ...]
    seconds: float
    compute_seconds: float
    recompute_seconds: float
    stall_seconds: float
    copy_seconds: float
    overlapped_seconds: float
    peak_bytes: int
    fits: bool
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """All figures of trials of a single kind on a device.

    Attributes:
        num_trials: number of trials in each system.
        limit_bytes: limit that the systems were planned for: the device's memory, or less, where all trials fit with
            everything kept.
        static_bytes: of a single trial's parameters, buffers, optimizer state and batch.
        maps: the feature maps of a single trial, the longest idle first.
        curve: a step of a single trial.
        peaks: by the number of trials; above `_ALL_SIZES` trials only of powers of two, and of all trials.
        systems: the fastest that fits first, systems that do not fit last.
    """

    num_trials: int
    device_bytes: int
    limit_bytes: int
    static_bytes: int
    maps: tuple[IdleFeatureMap, ...]
    curve: tuple[MemoryCurvePoint, ...]
    peaks: tuple[FusedPeak, ...]
    systems: tuple[ComparedSystem, ...]

    @property
    def fits(self) -> bool:
        """Whether all trials fit the device in a single sub-array with everything kept."""
        return self.limit_bytes < self.device_bytes


def figures_of(
    array: Callable[[int], SubArrayProfile], num_trials: int, device_bytes: int, *, is_duplex: bool
) -> StepFigures:
    """Return the figures of trials of a single kind.

    `array` takes a number of trials, and is called once for each number.
    """
    profiles: dict[int, SubArrayProfile] = {}

    def of(size: int) -> SubArrayProfile:
        if size not in profiles:
            profiles[size] = array(size)
        return profiles[size]

    peaks = tuple(_fused(of(size), size) for size in _sizes(num_trials))
    limit = device_bytes
    if peaks[-1].peak_bytes <= device_bytes * (1 - MARGIN):
        # The planner takes its margin off the limit, so the margin is added here.
        limit = ceil((peaks[-1].static_bytes + SHARE * (peaks[-1].peak_bytes - peaks[-1].static_bytes)) / (1 - MARGIN))
        # `StepFigures.fits` reads off the limit that it was lowered.
        limit = min(limit, device_bytes - 1)
    portfolio = Planner(array=of, limit_bytes=limit, is_duplex=is_duplex).portfolio(num_trials)
    fastest = portfolio.members[0]
    return StepFigures(
        num_trials=num_trials,
        device_bytes=device_bytes,
        limit_bytes=limit,
        static_bytes=of(1).static_bytes,
        maps=_maps(of(1)),
        curve=_curve(of(1)),
        peaks=peaks,
        systems=tuple(_system(member, is_chosen=member is fastest and member.fits) for member in portfolio.members),
    )


def _sizes(num_trials: int) -> list[int]:
    if num_trials <= _ALL_SIZES:
        return list(range(1, num_trials + 1))
    powers = [1 << power for power in range(num_trials.bit_length()) if 1 << power < num_trials]
    return [*powers, num_trials]


def _fused(array: SubArrayProfile, size: int) -> FusedPeak:
    peak = peak_of(undecided((array,), _ENDLESS))[1].peak_bytes
    return FusedPeak(num_trials=size, static_bytes=array.static_bytes, peak_bytes=peak, seconds=array.seconds)


def _maps(array: SubArrayProfile) -> tuple[IdleFeatureMap, ...]:
    candidates = candidates_of(array, 0)
    idle_maps = []
    for name, feature_map in array.maps.items():
        recompute_seconds = candidates[name].seconds if name in candidates and candidates[name].can_recompute else None
        idle_maps.append(
            IdleFeatureMap(
                name=name,
                num_bytes=feature_map.num_bytes,
                inactive_seconds=feature_map.inactive_seconds,
                out_seconds=feature_map.out_seconds if isfinite(feature_map.out_seconds) else None,
                in_seconds=feature_map.in_seconds if isfinite(feature_map.in_seconds) else None,
                recompute_seconds=recompute_seconds,
            )
        )
    return tuple(sorted(idle_maps, key=lambda feature_map: -feature_map.inactive_seconds))


def _curve(array: SubArrayProfile) -> tuple[MemoryCurvePoint, ...]:
    schedule, elapsed_seconds = undecided((array,), _ENDLESS), 0.0
    points: list[MemoryCurvePoint] = []
    for segment in schedule.segments:
        for instruction, num_bytes in _followed(schedule, segment):
            # Nothing is decided, so every instruction is an operator.
            ops = array.backward if instruction.is_backward else array.forward
            elapsed_seconds += instruction.seconds
            points.append(
                MemoryCurvePoint(
                    name=ops[instruction.rank].name,
                    is_backward=instruction.is_backward,
                    seconds=elapsed_seconds,
                    num_bytes=num_bytes,
                )
            )
    return tuple(points)


def _followed(schedule: SubArraySchedule, segment: ScheduleSegment) -> list[tuple[Instruction, int]]:
    return list(zip(lowered(schedule, segment), curve(schedule, segment), strict=True))


def _system(member: PortfolioPlan, *, is_chosen: bool) -> ComparedSystem:
    times = sum((part.times for part in member.parts), StepTimeBreakdown())
    return ComparedSystem(
        seconds=times.seconds,
        compute_seconds=times.compute,
        name=member.name,
        stands_for=_PAPER.get(member.name, ""),
        sub_arrays=tuple(part.sizes for part in member.parts),
        ways=tuple(part.way for part in member.parts),
        recompute_seconds=times.recompute,
        stall_seconds=times.stall,
        copy_seconds=times.copies,
        overlapped_seconds=max(0.0, times.copies - times.stall),
        peak_bytes=member.peak_bytes,
        fits=member.fits,
        is_chosen=is_chosen,
    )
