"""`Decision`: one call of the scheduler, with when it was; as plain data, and made again."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hydra_tune.schedule import commands, events
from hydra_tune.schedule.commands import Command
from hydra_tune.schedule.events import Event
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.schedule.policy import Policy
from hydra_tune.schedule.units import Unit

_EVENTS: Mapping[str, Any] = {kind.__name__: kind for kind in events.Event.__args__}
_COMMANDS: Mapping[str, Any] = {kind.__name__: kind for kind in commands.Command.__args__}


@dataclass(frozen=True, slots=True)
class Decision:
    """What the scheduler was told in one call, and what it commanded.

    Args:
        at_ns: when, in nanoseconds of any clock.
        events: what it was told.
        commands: what it said.
    """

    at_ns: int
    events: tuple[Event, ...]
    commands: tuple[Command, ...]

    def to_json(self) -> list[Any]:
        """Plain data."""
        return [self.at_ns, [_plain(event) for event in self.events], [_plain(command) for command in self.commands]]

    @staticmethod
    def from_json(data: Any) -> "Decision":
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        at_ns, told, said = data
        return Decision(
            int(at_ns),
            tuple(_made(_EVENTS, entry) for entry in told),
            tuple(_made(_COMMANDS, entry) for entry in said),
        )


def decide_again(
    decisions: Iterable[Decision], policy: Policy, *, max_concurrent: int, admission: str = "eager"
) -> list[Decision]:
    """Tell a new scheduler what another was told.

    Args:
        decisions: the other's.
        policy: the same policy, or another.
        max_concurrent: as the other's.
        admission: as the other's.

    Returns:
        What it decided: exactly the same, where the policy is the same.

    Raises:
        ScheduleError: with another policy, what was told soon becomes impossible.
    """
    scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent, admission=admission)
    return [
        Decision(decision.at_ns, decision.events, tuple(scheduler.handle(*decision.events))) for decision in decisions
    ]


def _plain(entry: Event | Command) -> dict[str, Any]:
    fields = entry._asdict() if isinstance(entry, tuple) else asdict(entry)
    if isinstance(fields.get("unit"), Unit):
        fields["unit"] = asdict(fields["unit"])
    if "others" in fields:
        fields["others"] = [asdict(unit) for unit in fields["others"]]
    return {"is": type(entry).__name__, **fields}


def _made(kinds: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    fields = {name: value for name, value in data.items() if name != "is"}
    if fields.get("unit") is not None:
        fields["unit"] = Unit(**fields["unit"])
    if "others" in fields:
        fields["others"] = tuple(Unit(**unit) for unit in fields["others"])
    return kinds[data["is"]](**fields)
