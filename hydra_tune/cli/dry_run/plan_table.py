"""Formats the result of `hydra-tune plan` as tables and as plain data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.cli.sweep_file.domains import Scalar
from hydra_tune.memory.block import BlockKind
from hydra_tune.pool.dry_run.fusion_report import FusionForecast
from hydra_tune.pool.dry_run.report import PoolForecast, TrialForecast
from hydra_tune.quantities import format_bytes, format_bytes_up, format_seconds

_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationForecast:
    """One configuration.

    Attributes:
        number: from 0.
        params: drawn parameters.
        forecast: forecast of the trial alone in the pool; None if no plan is possible.
        error: reason for no plan.
        enough_bytes: sufficient budget where memory is short, in bytes.
        shapes_only: whether the plan was made without the trial's data.
    """

    number: int
    params: Mapping[str, Scalar]
    forecast: PoolForecast | None
    error: str | None = None
    enough_bytes: int | None = None
    shapes_only: bool = False

    @property
    def splits(self) -> list[str]:
        """Chosen `split_batches` with the reason, where the task leaves the choice to the pool."""
        return (
            [] if self.forecast is None else [trial.split for trial in self.forecast.trials if trial.split is not None]
        )

    @property
    def cuts(self) -> list[str]:
        """Chosen cut with the reason, where `num_shards` is "tuned" and there was a choice."""
        return [] if self.forecast is None else [trial.cut for trial in self.forecast.trials if trial.cut is not None]

    @property
    def placements(self) -> list[str]:
        """Chosen place of the updates with the reason, where `optimizer_placement` is "auto"."""
        trials = () if self.forecast is None else self.forecast.trials
        return [trial.placement for trial in trials if trial.placement is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        found: dict[str, Any] = {"number": self.number, "params": dict(self.params), "error": self.error}
        found["shapes_only"] = self.shapes_only
        if self.splits:
            found["splits"] = self.splits
        if self.cuts:
            found["cuts"] = self.cuts
        if self.placements:
            found["placements"] = self.placements
        if self.forecast is None:
            return found | {"smallest_budget_bytes": self.enough_bytes}
        plain = self.forecast.to_json()
        # Each configuration was planned alone, so its forecast has exactly one trial.
        (trial,) = plain.pop("trials")
        del trial["name"], trial["split"], trial["cut"], trial["placement"]
        return {**found, **trial, **plain}


def print_planned(
    console: Console, planned: Sequence[ConfigurationForecast], notes: Sequence[str] = (), *, shows_fusion: bool = False
) -> None:
    """Print the planned configurations.

    Args:
        console: output console.
        planned: the configurations.
        notes: remarks on all plans; printed first.
        shows_fusion: whether to list the trials that could be fused.
    """
    found = [(one.number, one.forecast) for one in planned if one.forecast is not None]
    for note in notes:
        console.print(Text(note, style="bold yellow"), soft_wrap=True)
    if found:
        console.print(Text(_devices(found[0][1])), soft_wrap=True)
    for words in _configurations(planned):
        console.print(Text(words), soft_wrap=True)
    if found:
        _print_table(console, _shape(found))
        _print_table(console, _traffic(found))
        for way in _ways(found):
            console.print(Text(f"\n{way}"))
        for line in [*(_fusion(found) if shows_fusion else []), *_alike(found)]:
            console.print()
            console.print(line, soft_wrap=True)
    for one in planned:
        for reason in (*one.splits, *one.cuts, *one.placements):
            console.print(Text(f"\ntrial {one.number}: {reason}"), soft_wrap=True)
        if one.error is not None:
            remedy = "" if one.enough_bytes is None else f" (device_memory: {format_bytes_up(one.enough_bytes)})"
            console.print(Text(f"\ntrial {one.number} cannot be trained{remedy}: {one.error}"), soft_wrap=True)


def _devices(forecast: PoolForecast) -> str:
    budgets = Counter(device.budget_bytes for device in forecast.devices.values())
    sizes = ", ".join(f"{count} of {format_bytes(budget)}" for budget, count in budgets.items())
    return f"devices: {sizes}; each trial as if it were alone on them"


def _configurations(planned: Sequence[ConfigurationForecast]) -> list[str]:
    """List the parameters common to all configurations once, then each configuration's own."""
    first = planned[0].params if len(planned) > 1 else {}
    same = {name for name, value in first.items() if all(one.params[name] == value for one in planned)}
    lines = [f"all: {_written(first, same)}"] if same else []
    return lines + [f"trial {one.number}: {_written(one.params, one.params.keys() - same)}" for one in planned]


def _written(params: Mapping[str, Scalar], names: AbstractSet[str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items() if name in names)


def _alike(found: Sequence[tuple[int, PoolForecast]]) -> list[Text]:
    """Describe the trials with the same architecture, if any."""
    numbers: dict[int, list[int]] = {}
    for number, forecast in found:
        architecture = forecast.trials[0].architecture
        if architecture is not None:
            numbers.setdefault(architecture, []).append(number)
    groups = [", ".join(map(str, members)) for members in numbers.values() if len(members) > 1]
    lines = [Text(f"same architecture: {'; '.join(groups)}")] if groups else []
    unchecked = [str(number) for number, forecast in found if not forecast.trials[0].is_checked]
    if unchecked:
        lines.append(Text(f"not compared with a step of the model, which is too large here: {', '.join(unchecked)}"))
    return lines


def _fusion(found: Sequence[tuple[int, PoolForecast]]) -> list[Text]:
    """Describe the trials that could be fused, the gain, and the reasons for the others."""
    members: dict[int, list[int]] = {}
    alone: dict[str, list[int]] = {}
    seen: dict[int, FusionForecast] = {}
    for number, forecast in found:
        fusion = forecast.trials[0].fusion
        if fusion.group is None:
            alone.setdefault(str(fusion.why_alone), []).append(number)
        else:
            members.setdefault(fusion.group, []).append(number)
            seen.setdefault(fusion.group, fusion)
    lines = [
        f"can be computed together, up to {seen[group].room} at a time: {_numbers(numbers)}"
        + ("" if seen[group].told is None else f"\n  {seen[group].told}")
        for group, numbers in members.items()
    ]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, forecast in found:
        fusion = forecast.trials[0].fusion
        if fusion.planned is not None:
            kinds.setdefault(fusion.planned.told, []).append(number)
        elif fusion.why_not_planned is not None:
            kinds.setdefault((f"not planned: {fusion.why_not_planned}",), []).append(number)
    lines += [
        f"with planned steps, beyond what a device has room for: {_numbers(numbers)}"
        + "".join(f"\n  {line}" for line in told)
        for told, numbers in kinds.items()
    ]
    lines += [f"computed by itself, for {reason}: {_numbers(numbers)}" for reason, numbers in alone.items()]
    return [Text(line) for line in lines]


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class _PlanTableColumn:
    """A heading and a cell for each trial."""

    name: str
    cells: list[str]

    @property
    def width(self) -> int:
        """Width in characters, with the gap before the column."""
        return max(map(len, (self.name, *self.cells))) + 1


def _print_table(console: Console, columns: Sequence[_PlanTableColumn]) -> None:
    """Print columns side by side; on a narrow console, continue below, beside the first column again."""
    first, *rest = columns
    while rest:
        room, count = console.width + 1 - first.width, 0
        while count < len(rest) and (room := room - rest[count].width) >= 0:
            count += 1
        # At least one column, however narrow the console: the loop must end.
        count = max(1, count)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for column in (first, *rest[:count]):
            table.add_column(column.name, justify="right", overflow="fold")
        for cells in zip(*(column.cells for column in (first, *rest[:count])), strict=True):
            table.add_row(*map(Text, cells))
        console.print()
        console.print(table)
        rest = rest[count:]


def _shape(found: Sequence[tuple[int, PoolForecast]]) -> list[_PlanTableColumn]:
    forecasts = [forecast for _, forecast in found]
    trials = [forecast.trials[0] for forecast in forecasts]
    peaks = [max(device.peak_bytes for device in forecast.devices.values()) for forecast in forecasts]
    return [
        _PlanTableColumn("trial", [str(number) for number, _ in found]),
        _PlanTableColumn("|W|", [format_bytes(trial.parameter_bytes) for trial in trials]),
        _PlanTableColumn("shards", [_shards(trial) for trial in trials]),
        _PlanTableColumn("units", [str(trial.units_per_step) for trial in trials]),
        _PlanTableColumn("activations", [_counted(trial.activations) for trial in trials]),
        _PlanTableColumn("updates", [f"on {trial.optimizer_placement}" for trial in trials]),
        _PlanTableColumn("peak", [format_bytes(peak) for peak in peaks]),
        _PlanTableColumn("least budget", [format_bytes_up(trial.smallest_budget_bytes) for trial in trials]),
        _PlanTableColumn(
            "step", [format_seconds(trial.step_seconds) if trial.step_seconds else _NOTHING for trial in trials]
        ),
    ]


def _shards(trial: TrialForecast) -> str:
    if trial.runs_own_code:
        return "uncut"
    return "whole" if trial.is_whole else str(trial.num_shards)


def _ways(found: Sequence[tuple[int, PoolForecast]]) -> list[str]:
    """Describe how trials run, and why."""
    numbers: dict[str, list[int]] = {}
    for number, forecast in found:
        trial = forecast.trials[0]
        numbers.setdefault(f"{_way(trial)}, because {trial.why}", []).append(number)
    return [f"runs {way}: {_numbers(which)}" for way, which in numbers.items()]


def _way(trial: TrialForecast) -> str:
    if trial.runs_own_code:
        return "as it is"
    return "whole" if trial.is_whole else f"in {trial.num_shards} shard{'' if trial.num_shards == 1 else 's'}"


def _counted(activations: Sequence[str]) -> str:
    counts = Counter(activations)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or _NOTHING


def _traffic(found: Sequence[tuple[int, PoolForecast]]) -> list[_PlanTableColumn]:
    """Bytes moved in a step, both ways together: one column for each kind with any bytes."""
    moved = [forecast.bytes_by_kind for _, forecast in found]
    kinds = [kind.value for kind in BlockKind if any(kind.value in one for one in moved)]
    return [
        _PlanTableColumn("moved", [str(number) for number, _ in found]),
        *(
            _PlanTableColumn(kind, [format_bytes(one[kind]) if kind in one else _NOTHING for one in moved])
            for kind in kinds
        ),
        _PlanTableColumn("over |W|", [f"{forecast.parameter_traffic:.2f}" for _, forecast in found]),
    ]
