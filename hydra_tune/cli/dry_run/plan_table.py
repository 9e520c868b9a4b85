"""Formats the result of `hydra-tune plan` as tables and as plain data.

`run_plan` (`planning.py`) makes a `ConfigurationForecast` as each configuration is planned, and at the end prints all of
them by `print_planned`, or writes each `to_json`. The module must plan and train nothing.
"""

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
from hydra_tune.quantities import format_bytes, format_bytes_up, format_short_seconds

_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationForecast:
    """One configuration.

    Attributes:
        number: from 0.
        forecast: forecast of the trial alone in the pool; None if no plan is possible.
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

    @property
    def parallels(self) -> list[str]:
        """How several batches of a step would use idle devices, where there are several of both."""
        trials = () if self.forecast is None else self.forecast.trials
        return [trial.parallel for trial in trials if trial.parallel is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        fields: dict[str, Any] = {"number": self.number, "params": dict(self.params), "error": self.error}
        fields["shapes_only"] = self.shapes_only
        if self.splits:
            fields["splits"] = self.splits
        if self.cuts:
            fields["cuts"] = self.cuts
        if self.placements:
            fields["placements"] = self.placements
        if self.parallels:
            fields["parallels"] = self.parallels
        if self.forecast is None:
            return fields | {"smallest_budget_bytes": self.enough_bytes}
        plain = self.forecast.to_json()
        # Each configuration was planned alone, so its forecast has exactly one trial.
        (trial,) = plain.pop("trials")
        # The name is the pool's, and the other four stand in the lists above, with their reasons.
        del trial["name"], trial["split"], trial["cut"], trial["placement"], trial["parallel"]
        return {**fields, **trial, **plain}


def print_planned(
    console: Console, planned: Sequence[ConfigurationForecast], notes: Sequence[str] = (), *, shows_fusion: bool = False
) -> None:
    """Print `notes` on all plans, then the planned configurations."""
    forecasts = [
        (configuration.number, configuration.forecast)
        for configuration in planned
        if configuration.forecast is not None
    ]
    for note in notes:
        console.print(Text(note, style="bold yellow"), soft_wrap=True)
    if forecasts:
        # All forecasts are of the same devices.
        console.print(Text(_devices(forecasts[0][1])), soft_wrap=True)
    for words in _configurations(planned):
        console.print(Text(words), soft_wrap=True)
    if forecasts:
        _print_table(console, _shape(forecasts))
        _print_table(console, _traffic(forecasts))
        for way in _ways(forecasts):
            console.print(Text(f"\n{way}"))
        for line in [*(_fusion(forecasts) if shows_fusion else []), *_alike(forecasts)]:
            console.print()
            console.print(line, soft_wrap=True)
    for configuration in planned:
        for reason in (*configuration.splits, *configuration.cuts, *configuration.placements, *configuration.parallels):
            console.print(Text(f"\ntrial {configuration.number}: {reason}"), soft_wrap=True)
        if configuration.error is not None:
            remedy = (
                ""
                if configuration.enough_bytes is None
                else f" (device_memory: {format_bytes_up(configuration.enough_bytes)})"
            )
            console.print(
                Text(f"\ntrial {configuration.number} cannot be trained{remedy}: {configuration.error}"), soft_wrap=True
            )


def _devices(forecast: PoolForecast) -> str:
    budgets = Counter(device.budget_bytes for device in forecast.devices.values())
    sizes = ", ".join(f"{count} of {format_bytes(budget)}" for budget, count in budgets.items())
    return f"devices: {sizes}; each trial as if it were alone on them"


def _configurations(planned: Sequence[ConfigurationForecast]) -> list[str]:
    """List the parameters common to all configurations once, then each configuration's own."""
    # With a single configuration everything would be common, and its own line empty.
    first = planned[0].params if len(planned) > 1 else {}
    same = {
        name for name, value in first.items() if all(configuration.params[name] == value for configuration in planned)
    }
    lines = [f"all: {_written(first, same)}"] if same else []
    return lines + [
        f"trial {configuration.number}: {_written(configuration.params, configuration.params.keys() - same)}"
        for configuration in planned
    ]


def _written(params: Mapping[str, Scalar], names: AbstractSet[str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items() if name in names)


def _alike(found: Sequence[tuple[int, PoolForecast]]) -> list[Text]:
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
    members: dict[int, list[int]] = {}
    alone: dict[str, list[int]] = {}
    forecast_of_group: dict[int, FusionForecast] = {}
    for number, forecast in found:
        fusion = forecast.trials[0].fusion
        if fusion.group is None:
            alone.setdefault(str(fusion.why_alone), []).append(number)
        else:
            members.setdefault(fusion.group, []).append(number)
            forecast_of_group.setdefault(fusion.group, fusion)
    lines = [
        f"can be computed together, up to {forecast_of_group[group].room} at a time: {_numbers(numbers)}"
        + ("" if forecast_of_group[group].told is None else f"\n  {forecast_of_group[group].told}")
        for group, numbers in members.items()
    ]
    # By the words of a plan: trials with the same plan share its lines.
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, forecast in found:
        fusion = forecast.trials[0].fusion
        if fusion.planned is not None:
            kinds.setdefault(fusion.planned.told, []).append(number)
        elif fusion.why_not_planned is not None:
            kinds.setdefault((f"not planned: {fusion.why_not_planned}",), []).append(number)
    lines += [
        f"with planned steps, beyond what a device has room for: {_numbers(numbers)}"
        + "".join(f"\n  {line}" for line in plan_lines)
        for plan_lines, numbers in kinds.items()
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
        """Width in characters, with a gap."""
        return max(map(len, (self.name, *self.cells))) + 1


def _print_table(console: Console, columns: Sequence[_PlanTableColumn]) -> None:
    """Print columns side by side; on a narrow console, continue below, beside the first column again."""
    first, *remaining_columns = columns
    while remaining_columns:
        room, count = console.width + 1 - first.width, 0
        while count < len(remaining_columns) and (room := room - remaining_columns[count].width) >= 0:
            count += 1
        # At least one column, however narrow the console: the loop must end.
        count = max(1, count)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for column in (first, *remaining_columns[:count]):
            table.add_column(column.name, justify="right", overflow="fold")
        for cells in zip(*(column.cells for column in (first, *remaining_columns[:count])), strict=True):
            table.add_row(*map(Text, cells))
        console.print()
        console.print(table)
        remaining_columns = remaining_columns[count:]


def _shape(found: Sequence[tuple[int, PoolForecast]]) -> list[_PlanTableColumn]:
    forecasts = [forecast for _, forecast in found]
    trials = [forecast.trials[0] for forecast in forecasts]
    # Of the device that needs most, because any device may get the trial's largest unit.
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
            "step", [format_short_seconds(trial.step_seconds) if trial.step_seconds else _NOTHING for trial in trials]
        ),
    ]


def _shards(trial: TrialForecast) -> str:
    if trial.runs_own_code:
        return "uncut"
    return "whole" if trial.is_whole else str(trial.num_shards)


def _ways(found: Sequence[tuple[int, PoolForecast]]) -> list[str]:
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
    """Return the bytes moved in a step, both ways together: one column for each kind with any bytes."""
    bytes_of_trials = [forecast.bytes_by_kind for _, forecast in found]
    # In the order of `BlockKind`, whichever kinds the first trial moves.
    kinds = [
        kind.value for kind in BlockKind if any(kind.value in bytes_of_trial for bytes_of_trial in bytes_of_trials)
    ]
    return [
        _PlanTableColumn("moved", [str(number) for number, _ in found]),
        *(
            _PlanTableColumn(
                kind,
                [
                    format_bytes(bytes_of_trial[kind]) if kind in bytes_of_trial else _NOTHING
                    for bytes_of_trial in bytes_of_trials
                ],
            )
            for kind in kinds
        ),
        _PlanTableColumn("over |W|", [f"{forecast.parameter_traffic:.2f}" for _, forecast in found]),
    ]
