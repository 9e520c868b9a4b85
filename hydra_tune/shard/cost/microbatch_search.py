"""Chooses the number of pieces of a batch, if the task leaves the choice to the pool (the microbatch size of Harmony).

For each tried number, the step is cut as for training, packed anew where the pool may choose the cuts
(`shard/partition/shard_size_search.py`), and simulated (`traffic_model.py`). `train/loop/microbatch_choice.py` calls
`choose_count` on the first batch of a trial with `split_batches="auto"`, unless a similar trial has chosen before.
`step_estimate.py` makes the `StepCostEstimate`, and `PlanLibrary` (`shard/partition/plan_cache.py`) keeps the choices.
`train/loop/microbatches.py` and `shard/partition/partition_planner.py` ask `whole_batch_layer`, and `SingleTrial`
(`train/single_trial.py`) asks `divisors`.

Note: the rule. The numbers are divisors of the batch size, so that all pieces are equal and share a plan. The fewest
pieces that fit are taken, a whole batch first, unless a step in more pieces is expected to be clearly shorter. Then the
number with the shortest step is taken, or the smallest of about equal numbers. Where units and copies cannot be
compared (on GPUs, or for a model that runs whole), the bytes moved by a step stand for its seconds.

Note: no clock. The number is part of the computation, because another number rounds sums in another order. The choice
therefore uses the pilot and the estimates of `compute_estimate.py` and `devices/hardware/link.py`, equal on each run,
and never a measured time.

Source: the tuner of Harmony (Li et al., sections 3 and 4). Differs: forward and backward use the same number, because a
backward continues from its own piece's values, which would have to be cut or joined between the two.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from hydra_tune.quantities import format_bytes, format_short_seconds

_NEAR = 1.03  # within this factor of the shortest step, fewer pieces are better
_WORTH = 0.9  # share of the time in the fewest pieces that fit, which another number must not exceed
_APART = 2  # least ratio of a tried number to the number before; not of the last divisor, nor in the bisection
_PATIENCE = 2  # numbers in a row without clear improvement before larger numbers are given up


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCostEstimate:
    """Expected cost of a step.

    Attributes:
        num_shards: number of shards of the model.
        peak_bytes: largest needs of a unit.
        step_bytes: bytes that a step moves to and from the device.
        seconds: seconds of a step; None if units and copies cannot be compared.
        holds_for_all: whether the cost holds for all batches of the kind; false if the step reads values of the batch.
    """

    num_shards: int
    peak_bytes: int
    step_bytes: int
    seconds: float | None
    holds_for_all: bool = True


Probe = Callable[[int], StepCostEstimate | None]
"""Returns the foreseen step for a number of pieces; None if the step would not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCountChoice:
    """The chosen number of pieces.

    Attributes:
        count: pieces of each batch; if no number fits, a piece per sample.
        tried: expected cost for each number, in order; None for a number that does not fit.
    """

    count: int
    samples: int
    tried: tuple[tuple[int, StepCostEstimate | None], ...]

    @property
    def fits(self) -> bool:
        """Whether any number fits."""
        return dict(self.tried)[self.count] is not None

    @property
    def reason(self) -> str:
        """Sentence for the user."""
        cost_of_count = dict(self.tried)
        fewest = next((count for count, cost in cost_of_count.items() if cost is not None), None)
        chosen = cost_of_count[self.count]
        if chosen is None or fewest is None:
            return f"batches of {self.samples} do not fit, not even in pieces of one sample"
        choice_text = f"{self.count} pieces of each batch of {self.samples}" if self.count > 1 else "whole batches"
        if fewest > 1:
            cause = "whole batches would not fit" if fewest == self.count else f"fewer than {fewest} would not fit"
        elif self.count == 1:
            cause = "pieces would not make the step clearly shorter"
        else:
            cause = "whole batches would take longer"
        counts = ", ".join(f"{count}: {_said(cost)}" for count, cost in self.tried)
        moved = f"about {format_bytes(chosen.step_bytes)}" if chosen.step_bytes else "nothing"
        step = f"a step in {chosen.num_shards} shard{'s' * (chosen.num_shards > 1)} moves {moved}"
        rounded = f"; sums are rounded as with split_batches={self.count}" if self.count > 1 else ""
        return f"{choice_text}: {step}; {cause} (tried {counts}){rounded}"


def choose_count(samples: int, probe: Probe) -> PieceCountChoice:
    """Choose the number of pieces with the shortest expected step; see the note above.

    `probe` is called for some divisors of `samples`, each once.
    """
    cost_by_count: dict[int, StepCostEstimate | None] = {}

    def cost_of(count: int) -> StepCostEstimate | None:
        if count not in cost_by_count:
            cost_by_count[count] = probe(count)
        return cost_by_count[count]

    counts = divisors(samples)
    first = _fewest(counts, cost_of)
    if first is None:
        best = samples
    else:
        fitting = _tried_from(counts, first, cost_of)
        best = _best(fitting)
    return PieceCountChoice(count=best, samples=samples, tried=tuple(sorted(cost_by_count.items())))


def whole_batch_layer(module: nn.Module) -> str | None:
    """Return the name of a layer that normalizes over the samples of a batch, so that pieces would differ; None without."""
    return next((name for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)  # noqa: SLF001


def divisors(samples: int) -> list[int]:
    """Divisors of a number, in order."""
    return [count for count in range(1, samples + 1) if samples % count == 0]


def _fewest(counts: Sequence[int], found: Probe) -> int | None:
    """Smallest number that fits, assuming that smaller pieces need no more memory."""
    # First growing steps, then a bisection: every probe captures and measures a step.
    below, index = 0, 0
    while found(counts[index]) is None:
        if index == len(counts) - 1:
            return None
        below, index = index + 1, min(bisect_left(counts, counts[index] * _APART), len(counts) - 1)
    return counts[bisect_left(counts, True, below, index, key=lambda count: found(count) is not None)]


def _tried_from(counts: Sequence[int], first: int, found: Probe) -> dict[int, StepCostEstimate]:
    """Costs of the numbers from `first` on, as long as larger numbers promise an improvement."""
    start = found(first)
    assert start is not None, "the first number fits"
    fitting, last, least, in_vain = {first: start}, first, start, 0
    for count in counts:
        # If nothing moves, a larger number cannot move less.
        if not least.step_bytes or in_vain == _PATIENCE:
            break
        if count < last * _APART:
            continue
        last, step = count, found(count)
        if step is None:
            continue
        fitting[count] = step
        cost = _costs([least, step])
        in_vain = 0 if cost[1] * _NEAR < cost[0] else in_vain + 1
        least = step if cost[1] < cost[0] else least
    return fitting


def _best(fitting: dict[int, StepCostEstimate]) -> int:
    """Smallest number with about the shortest step; the first number if little would be gained."""
    costs = dict(zip(fitting, _costs(list(fitting.values())), strict=True))
    shortest, first = min(costs.values()), next(iter(costs))
    best = next(count for count, cost in costs.items() if cost <= shortest * _NEAR)
    return best if costs[best] <= costs[first] * _WORTH else first


def _costs(steps: Sequence[StepCostEstimate]) -> list[float]:
    """Seconds of each step, or bytes if some steps have no seconds."""
    # Seconds for all steps or for none: seconds cannot be compared with bytes.
    seconds = [step.seconds for step in steps if step.seconds is not None]
    return seconds if len(seconds) == len(steps) else [float(step.step_bytes) for step in steps]


def _said(one: StepCostEstimate | None) -> str:
    if one is None:
        return "does not fit"
    seconds = "" if one.seconds is None else f", {format_short_seconds(one.seconds)}"
    return f"{format_bytes(one.step_bytes)}{seconds}"
