"""Profiles: trials and devices of a simulation as JSON, written by hand, forecast or measured in a real run.

`hydra-tune simulate PROFILE` (`cli/commands/simulate.py`) calls `read_profile` before the simulation, and people call
`recorded_profile` after a recorded run; `benchmarks/replay.py` calls `parse_profile` and `recorded_profile`.
`pool/dry_run/simulator_profile.py` makes the same format from a forecast. The module must not import the pool, torch or
numpy.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import JobSubmitted, Unit
from hydra_tune.simulate.model import (
    PROFILE_FORMAT,
    Outage,
    Scenario,
    SimulatedDevice,
    SimulatedTrial,
    Slowdown,
    check_size,
    training_step,
)
from hydra_tune.simulate.recorded.recording import Recording
from hydra_tune.simulate.recorded.script import JobScript, scripts_of

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class _ProfileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ProfileShard(_ProfileEntry):
    bytes: int = Field(default=0, ge=0)
    forward_seconds: _Seconds | None = None
    backward_seconds: _Seconds


class _ProfileUnit(_ProfileEntry):
    kind: str
    shard: int = Field(ge=0)
    seconds: _Seconds


class _ProfileTrial(_ProfileEntry):
    name: str
    count: _Count = 1
    shards: list[_ProfileShard] = Field(default_factory=list)
    step: list[_ProfileUnit] = Field(default_factory=list)
    shard_bytes: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    steps: _Count
    report_steps: _Count | None = None
    stop_after_reports: _Count | None = None
    arrival_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    estimate_factor: _Rate = 1.0
    corrected_after_steps: _Count | None = None
    boundary_bytes: int = Field(default=0, ge=0)
    priority: int = 0

    @property
    def num_parts(self) -> int:
        """Number of shards of all trials of the group."""
        return self.count * self._num_shards

    @property
    def _num_shards(self) -> int:
        return max(len(self.shards), len(self.shard_bytes), 1 + max((unit.shard for unit in self.step), default=-1))

    def trials(self) -> list[SimulatedTrial]:
        """Return the group's trials, named `NAME-0`, `NAME-1` and so on where the group has several.

        Raises:
            ConfigError: the profile has both shards and a step, or neither; a shard before the last has no forward seconds; or
                as of `SimulatedTrial`.
        """
        if bool(self.shards) == bool(self.step):
            raise ConfigError(f"trial {self.name!r} needs either shards or step, with at least one entry")
        if self.step:
            step = tuple(Unit(kind=unit.kind, shard=unit.shard, seconds=unit.seconds) for unit in self.step)
            sizes = tuple(self.shard_bytes) or (0,) * self._num_shards
        else:
            step, sizes = self._training_step(), tuple(shard.bytes for shard in self.shards)
        names = [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]
        # All other fields are those of `SimulatedTrial`, by the same names.
        fields = self.model_dump(exclude={"name", "count", "shards", "step", "shard_bytes"})
        return [SimulatedTrial(name=name, step=step, shard_bytes=sizes, **fields) for name in names]

    def _training_step(self) -> tuple[Unit, ...]:
        for number, shard in enumerate(self.shards[:-1]):
            if shard.forward_seconds is None:
                raise ConfigError(f"trial {self.name!r}: shard {number} needs forward_seconds; only the last has none")
        forward = [shard.forward_seconds or 0.0 for shard in self.shards]
        return training_step(forward, [shard.backward_seconds for shard in self.shards])


class _ProfileDevice(_ProfileEntry):
    name: str
    speed: _Rate = 1.0
    memory_bytes: _Count | None = None
    bandwidth: _Rate | None = None
    node: str = "node0"
    joins_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class _ProfileSlowdown(_ProfileEntry):
    device: str
    at_seconds: float = Field(ge=0, allow_inf_nan=False)
    factor: _Rate


class _ProfileOutage(_ProfileEntry):
    device: str
    at_seconds: float = Field(ge=0, allow_inf_nan=False)
    until_seconds: _Seconds | None = None


class _ProfileDocument(_ProfileEntry):
    format: int = PROFILE_FORMAT
    trials: list[_ProfileTrial] = Field(min_length=1)
    devices: list[_ProfileDevice] = Field(min_length=1)
    slowdowns: list[_ProfileSlowdown] = Field(default_factory=list)
    outages: list[_ProfileOutage] = Field(default_factory=list)
    max_concurrent: _Count | None = None
    admission: Literal["eager", "staggered"] = "eager"
    overlap: bool = True
    network_bandwidth: _Rate | None = None
    node_bandwidth: _Rate | None = None
    answer_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    prepare_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def read_profile(path: Path) -> Scenario:
    """Read a profile.

    Args:
        path: a JSON file; docs/reference/profile.md describes the format.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or not a profile; the message names the file and the place in the
            file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give another file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return parse_profile(content, source=str(path))


def parse_profile(content: Any, *, source: str) -> Scenario:
    """Make a scenario of a profile's content, the parsed JSON; `source` names the content in messages.

    Raises:
        ConfigError: not a profile; the message names the source and the place in the content.
    """
    try:
        profile = _ProfileDocument.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_found(detail)}" for detail in error.errors())) from error
    if profile.format != PROFILE_FORMAT:
        raise ConfigError(
            f"{source}: format must be {PROFILE_FORMAT}, not {profile.format}; it is from another version"
        )
    try:
        # Before any trial is made, because a large `count` would exhaust the memory.
        check_size(sum(group.num_parts for group in profile.trials), "shards of all trials together")
        return Scenario(
            trials=tuple(trial for group in profile.trials for trial in group.trials()),
            devices=tuple(SimulatedDevice(**device.model_dump()) for device in profile.devices),
            slowdowns=tuple(Slowdown(**slowdown.model_dump()) for slowdown in profile.slowdowns),
            outages=tuple(Outage(**outage.model_dump()) for outage in profile.outages),
            **profile.model_dump(exclude={"format", "trials", "devices", "slowdowns", "outages"}),
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _found(detail: Mapping[str, Any]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    got = "" if detail["type"] in ("missing", "extra_forbidden") else f", not {detail['input']!r}"
    return f"{place or 'the profile'}: {detail['msg'][0].lower()}{detail['msg'][1:]}{got}"


# Kinds of blocks that a shard keeps from step to step; boundaries and kept activations do not last.
_STATE = ("parameters", "buffers", "optimizer")
_SECOND = 1e9


def recorded_profile(recording: Recording) -> dict[str, Any]:
    """Make a profile of a recorded run: mean seconds of each trial's units by shard, and the bytes of the shards.

    Args:
        recording: of a run that has ended.

    Returns:
        The content of a profile, for `json.dump`. A trial arrives at the time when it was ready to run; the time
        counts from the moment when the first trial was ready. Evaluation is spread over the steps, the pool's overhead
        counts as part of the units, and loads are prefetched if the pool has finished any copy in the background.

    Raises:
        ConfigError: nothing ran, the run had not ended, or several devices worked for one job at once.
    """
    scripts = scripts_of(recording).scripts
    ran = {job: script for job, script in scripts.items() if script.parts}
    if not ran:
        raise ConfigError("a profile needs a run in which at least one unit ran")
    # The simulation's clock begins at 0, with the job that was ready first.
    start = min(script.ready_ns for script in ran.values())
    priorities = {event.job: event.priority for event in _submissions(recording)}
    trials = [
        {
            **_recorded_trial(job, script, recording),
            "arrival_seconds": (script.ready_ns - start) / _SECOND,
            "priority": priorities[job],
        }
        for job, script in ran.items()
    ]
    copies = [copy for turn in recording.turns for copy in (*turn.copies, *turn.sent)]
    copy_seconds = sum(copy.ended_ns - copy.began_ns for copy in copies) / _SECOND
    bandwidth = sum(copy.nbytes for copy in copies) / copy_seconds if copy_seconds else None
    return {
        "format": PROFILE_FORMAT,
        "trials": trials,
        "devices": [
            {"name": device.name, "memory_bytes": device.budget_bytes, "bandwidth": bandwidth}
            for device in recording.devices
        ],
        "max_concurrent": recording.max_concurrent,
        "admission": "staggered" if _is_staggered(recording) else "eager",
        "overlap": any(turn.sent for turn in recording.turns),
    }


def _is_staggered(recording: Recording) -> bool:
    """Whether the trials of a run were staggered; under "auto", whether any trial was submitted as staggered."""
    if recording.admission != "auto":
        return recording.admission == "staggered"
    return any(event.staggered for event in _submissions(recording))


def _submissions(recording: Recording) -> Iterator[JobSubmitted]:
    for decision in recording.decisions:
        yield from (event for event in decision.events if isinstance(event, JobSubmitted))


def _recorded_trial(job: str, script: JobScript, recording: Recording) -> dict[str, Any]:
    seconds: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    shards: dict[int, int] = {}  # of each block of state, by the block's number
    for part in script.parts:
        unit = part.unit
        seconds[unit.kind, unit.shard] += part.compute_ns / _SECOND  # type: ignore[assignment]  # counts may be fractions
        counts[unit.kind, unit.shard] += 1
        # A block belongs to the shard whose unit leases it first.
        for action in part.actions:
            for number in action.blocks if action.what == "lease" else ():
                shards.setdefault(number, unit.shard)
    # Units that run less than once a step, such as evaluation, are spread over all steps.
    steps = max(counts.values())
    sizes: Counter[int] = Counter()
    for number, shard in shards.items():
        facts = recording.blocks[number]
        if facts.kind in _STATE:
            sizes[shard] += facts.nbytes
    step = [
        {"kind": kind, "shard": shard, "seconds": total / steps}
        for (kind, shard), total in seconds.items()
        if total > 0
    ]
    num_shards = 1 + max(shard for _, shard in seconds)
    return {"name": job, "steps": steps, "step": step, "shard_bytes": [sizes[shard] for shard in range(num_shards)]}
