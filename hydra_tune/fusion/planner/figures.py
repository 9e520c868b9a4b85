"""What the paper's Figures 3 and 9 show, of the trials of a device: where a step's memory is, and what less would cost.

Figure 3: how long feature maps lie idle, the memory over a step, and the peak against the number of trials fused.
Figure 9: what each way of the portfolio computes, computes again, waits for and hides, and what memory it needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite

from hydra_tune.fusion.planner.arrays import Array
from hydra_tune.fusion.planner.candidates import candidates_of
from hydra_tune.fusion.planner.instructions import Instruction
from hydra_tune.fusion.planner.lowering import lowered
from hydra_tune.fusion.planner.memory import curve, peak_of
from hydra_tune.fusion.planner.portfolio import MARGIN, Member, Planner
from hydra_tune.fusion.planner.schedule import Schedule, Segment, undecided
from hydra_tune.fusion.planner.timeline import Times

SHARE = 0.6
"""Where all trials fit with everything kept, ways are compared in this share of what they need beside the static tensors."""

_PAPER = {
    "fits, one after another": "HFTA",
    "full fusion": "Capuchin on HFTA",
    "no interleaving": "μ-TWO without its multiplexer",
    "swaps alone": "μ-TWO, swaps alone",
    "recomputations alone": "μ-TWO, recomputations alone",
    "interleaved": "μ-TWO",
    "kept": "smaller sub-arrays, nothing moved",
}
_ALL_SIZES = 8  # up to so many trials the peak is shown for every number of them
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMap:
    """A feature map (Figure 3a).

    Attributes:
        name: of the storage: of the operator that makes it.
        num_bytes: its size.
        inactive_seconds: between its last use in the forward and its first in the backward.
        out_seconds: of a copy to the host; None if it is never swapped.
        in_seconds: of the copy back; None if it is never swapped.
        recompute_seconds: of computing it again from what is kept; None if that cannot be.
    """

    name: str
    num_bytes: int
    inactive_seconds: float
    out_seconds: float | None
    in_seconds: float | None
    recompute_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An operator of a step in which everything is kept (Figure 3b).

    Attributes:
        name: of the operator.
        is_backward: whether it belongs to the backward, updates included.
        seconds: from the step's beginning to its end.
        num_bytes: on the device while it runs, static tensors included.
    """

    name: str
    is_backward: bool
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPeak:
    """So many trials fused into one sub-array, with everything kept (Figure 3c).

    Attributes:
        num_trials: how many.
        static_bytes: of their parameters, buffers, optimizer state and batches.
        peak_bytes: the most memory that their step needs, static tensors included.
        seconds: that its operators take.
    """

    num_trials: int
    static_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to train all trials (Figure 9); seconds are of a step of all of them.

    Attributes:
        name: in the portfolio.
        stands_for: what the paper calls it; "" where it has none.
        sub_arrays: trials of each sub-array; those that are run in turn, as a pair, are together.
        ways: how each pair is run.
        seconds: all in all.
        compute_seconds: of operators that any way runs.
        recompute_seconds: of operators that are run again.
        stall_seconds: waited for copies.
        copy_seconds: of all copies.
        overlapped_seconds: of those, what goes on beside operators.
        peak_bytes: the most memory that it needs.
        fits: whether that is within the limit.
        is_chosen: whether it is the fastest that fits.
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
    """All of it, for trials of one kind on one device.

    Attributes:
        num_trials: of which the systems are made.
        device_bytes: the device's memory.
        limit_bytes: what the systems were planned for: the device's memory, or less, where all trials fit with everything kept.
        static_bytes: of one trial's parameters, buffers, optimizer state and batch.
        maps: the feature maps of one trial, those that lie idle longest first.
        curve: a step of one trial.
        peaks: by the number of trials.
        systems: the fastest that fits first, those that do not fit last.
    """

    num_trials: int
    device_bytes: int
    limit_bytes: int
    static_bytes: int
    maps: tuple[IdleMap, ...]
    curve: tuple[Moment, ...]
    peaks: tuple[FusedPeak, ...]
    systems: tuple[System, ...]

    @property
    def fits(self) -> bool:
        """Whether all trials fit the device in one sub-array with everything kept."""
        return self.limit_bytes < self.device_bytes


def figures_of(array: Callable[[int], Array], num_trials: int, device_bytes: int, *, is_duplex: bool) -> StepFigures:
    """Profile trials of one kind.

    Args:
        array: the profiled sub-array of a number of trials; asked once for each number.
        num_trials: of which the systems are made.
        device_bytes: the device's memory.
        is_duplex: whether copies in both directions go side by side.
    """
    known: dict[int, Array] = {}

    def of(size: int) -> Array:
        if size not in known:
            known[size] = array(size)
        return known[size]

    peaks = tuple(_fused(of(size), size) for size in _sizes(num_trials))
    limit = device_bytes
    if peaks[-1].peak_bytes <= device_bytes * (1 - MARGIN):
        limit = ceil((peaks[-1].static_bytes + SHARE * (peaks[-1].peak_bytes - peaks[-1].static_bytes)) / (1 - MARGIN))
        limit = min(limit, device_bytes - 1)
    portfolio = Planner(array=of, limit_bytes=limit, is_duplex=is_duplex).portfolio(num_trials)
    first = portfolio.members[0]
    return StepFigures(
        num_trials=num_trials,
        device_bytes=device_bytes,
        limit_bytes=limit,
        static_bytes=of(1).static_bytes,
        maps=_maps(of(1)),
        curve=_curve(of(1)),
        peaks=peaks,
        systems=tuple(_system(member, is_chosen=member is first and member.fits) for member in portfolio.members),
    )


def _sizes(num_trials: int) -> list[int]:
    if num_trials <= _ALL_SIZES:
        return list(range(1, num_trials + 1))
    powers = [1 << power for power in range(num_trials.bit_length()) if 1 << power < num_trials]
    return [*powers, num_trials]


def _fused(array: Array, size: int) -> FusedPeak:
    peak = peak_of(undecided((array,), _ENDLESS))[1].peak_bytes
    return FusedPeak(num_trials=size, static_bytes=array.static_bytes, peak_bytes=peak, seconds=array.seconds)


def _maps(array: Array) -> tuple[IdleMap, ...]:
    candidates = candidates_of(array, 0)
    found = []
    for name, one in array.maps.items():
        again = candidates[name].seconds if name in candidates and candidates[name].can_recompute else None
        found.append(
            IdleMap(
                name=name,
                num_bytes=one.num_bytes,
                inactive_seconds=one.inactive_seconds,
                out_seconds=one.out_seconds if isfinite(one.out_seconds) else None,
                in_seconds=one.in_seconds if isfinite(one.in_seconds) else None,
                recompute_seconds=again,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.inactive_seconds))


def _curve(array: Array) -> tuple[Moment, ...]:
    schedule, now = undecided((array,), _ENDLESS), 0.0
    found: list[Moment] = []
    for segment in schedule.segments:
        for one, num_bytes in _followed(schedule, segment):
            ops = array.backward if one.is_backward else array.forward
            now += one.seconds
            found.append(Moment(name=ops[one.rank].name, is_backward=one.is_backward, seconds=now, num_bytes=num_bytes))
    return tuple(found)


def _followed(schedule: Schedule, segment: Segment) -> list[tuple[Instruction, int]]:
    return list(zip(lowered(schedule, segment), curve(schedule, segment), strict=True))


def _system(member: Member, *, is_chosen: bool) -> System:
    times = Times()
    for part in member.parts:
        times += part.times
    return System(
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
