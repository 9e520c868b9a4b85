"""`SchedulerDecision`: a call of the scheduler with its time, as plain data for a file.

`PoolRecorder` (`pool/runtime/recorder.py`) keeps a `SchedulerDecision` of each call while a pool records, and
`simulate/recorded/recording.py` writes and reads the decisions as a file's data. `simulate/recorded/replay.py` compares
the decisions with a new schedule, and notes the new schedule's decisions. `benchmarks/replay.py` checks that equal events
give equal commands. A renamed event, command or field makes old recordings unreadable.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hydra_tune.schedule import commands, events
from hydra_tune.schedule.commands import Command
from hydra_tune.schedule.events import Event
from hydra_tune.schedule.units import Unit

# Taken from the unions, so that a new event or command is written and read without an entry here.
_EVENTS: Mapping[str, Any] = {kind.__name__: kind for kind in events.Event.__args__}
_COMMANDS: Mapping[str, Any] = {kind.__name__: kind for kind in commands.Command.__args__}


@dataclass(frozen=True, slots=True)
class SchedulerDecision:
    """The events of a single call to the scheduler, and the resulting commands.

    Args:
        at_ns: time of the call in nanoseconds, by any clock.
        events: events handed in.
        commands: commands returned.
    """

    at_ns: int
    events: tuple[Event, ...]
    commands: tuple[Command, ...]

    def to_json(self) -> list[Any]:
        """Convert to plain data."""
        return [self.at_ns, [_plain(event) for event in self.events], [_plain(command) for command in self.commands]]

    @staticmethod
    def from_json(data: Any) -> "SchedulerDecision":
        """Restore a decision from the output of `to_json`.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the data is no such output.
        """
        at_ns, event_entries, command_entries = data
        return SchedulerDecision(
            int(at_ns),
            tuple(_made(_EVENTS, entry) for entry in event_entries),
            tuple(_made(_COMMANDS, entry) for entry in command_entries),
        )


def _plain(entry: Event | Command) -> dict[str, Any]:
    # `Run` and `UnitFinished` are named tuples; all other events and commands are dataclasses.
    fields = entry._asdict() if isinstance(entry, tuple) else asdict(entry)
    # `asdict` has already converted a dataclass's units; `_asdict` leaves a named tuple's units as objects.
    if isinstance(fields.get("unit"), Unit):
        fields["unit"] = asdict(fields["unit"])
    if "others" in fields:
        fields["others"] = [asdict(unit) if isinstance(unit, Unit) else unit for unit in fields["others"]]
    return {"is": type(entry).__name__, **fields}


def _made(kinds: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    fields = {name: value for name, value in data.items() if name != "is"}
    if fields.get("unit") is not None:
        fields["unit"] = Unit(**fields["unit"])
    if "others" in fields:
        fields["others"] = tuple(Unit(**unit) for unit in fields["others"])
    return kinds[data["is"]](**fields)
