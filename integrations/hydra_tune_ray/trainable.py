"""`trainable`: what a Tuner of Ray Tune is given, so that its trials train in pools.

A trial is a process of its own that computes nothing: it takes its task to a pool, and each of its steps is a report that the
task makes there. It imports no torch.

Note: what Ray asks of a trial, and what the pool does. `step` answers the last report and waits for the next. Between the two
the trial waits in the pool, so that it has never done more than Ray has heard of. `save_checkpoint` writes the state that it
waits in or has ended with, and a ticket. `load_checkpoint` and `reset_config` only note what is wanted: where the next step
finds the trial waiting at the ticket's report, with the same config, it goes on; else it begins from the files. `cleanup`
cancels; or if the trial was saved at this very report, as when Ray pauses it, leaves it to its lease, within which another
process may come with the ticket.
"""

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE

from hydra_tune.errors import ConfigError
from hydra_tune_ray.client import Client
from hydra_tune_ray.errors import TrialError
from hydra_tune_ray.files import FOLDER, read_files
from hydra_tune_ray.messages import Begin, Files, Report, Ticket
from hydra_tune_ray.pickling import pickled
from hydra_tune_ray.pools import Pools, start_pools

CPUS = 0.01
"""What a trial takes of Ray's account; nothing at all is refused by Ray."""

_LOGGER = logging.getLogger("hydra_tune.ray")
_TICKET = "ticket.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all trials of one `trainable` have in common.

    Attributes:
        directory: the name of the directory of the pools.
        build: pickled.
        lease_seconds: how long a trial is trained without a sign of its process.
    """

    directory: str
    build: bytes
    lease_seconds: float


def trainable(
    build: Callable[..., Any], *, pools: Pools | None = None, lease_seconds: float = 30.0, **executor_options: Any
) -> type[Trainable]:
    """A class for `ray.tune.Tuner` whose trials train in pools.

    Args:
        build: from what Ray has drawn to a `TrainTask`: `build(config)`; `build(*, lr, width)` with the names of
            `param_space`; or an objective as for `hydra_tune_optuna`, whose `suggest_` calls are answered with
            what Ray has drawn.
        pools: where they train; None: `start_pools(**executor_options)`, which end with this program.
        lease_seconds: how long a trial whose process has vanished is still trained.
        executor_options: of the `HydraExecutor` of each node, e.g. `devices="cuda", device_memory="11GiB"`.

    Returns:
        The class. A trial takes 0.01 CPU of Ray's account; `ray.tune.with_resources` says otherwise.

    Raises:
        ConfigError: an option that makes no sense; or no node has such devices.
        BuildPickleError: `build` cannot be sent to a pool; the message names the object that is to blame.
        PoolError: a pool has not started.
    """
    if not callable(build):
        raise ConfigError(f"build must be a function that returns a TrainTask, not {build!r}")
    if isinstance(lease_seconds, bool) or not isinstance(lease_seconds, int | float) or not lease_seconds > 0:
        raise ConfigError(f"lease_seconds must be a number of seconds above 0, not {lease_seconds!r}")
    if pools is not None and executor_options:
        raise ConfigError(
            f"{next(iter(executor_options))} is an option of pools that are started, and pools= gives some that are there; "
            "give it to start_pools"
        )
    data = pickled(build, "build")
    found = start_pools(**executor_options) if pools is None else pools
    settings = Settings(directory=f"pools-{found.name}", build=data, lease_seconds=lease_seconds)
    name = getattr(build, "__name__", None) or type(build).__name__
    return type(name, (PoolTrainable,), {"settings": settings, "pools": found.name, "__doc__": PoolTrainable.__doc__})


class PoolTrainable(Trainable):
    """A trial that trains in a pool; made by `hydra_tune_ray.trainable`."""

    settings: Settings
    pools: str

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:  # noqa: ARG003 - Ray's signature
        """What it takes of Ray's account."""
        return PlacementGroupFactory([{"CPU": CPUS}])

    def setup(self, config: dict[str, Any]) -> None:
        """Nothing is trained before the first step."""
        self._drawn = config
        self._wanted: tuple[Files, Ticket] | None = None
        self._client: Client | None = None
        self._reset = False

    def step(self) -> dict[str, Any]:
        """Train until the next report."""
        if self._client is None or self._reset:
            self._go_on()
        assert self._client is not None
        outcome = self._client.next_report()
        if isinstance(outcome, Report):
            return {**outcome.metrics, "step": outcome.step, "is_last": outcome.is_last, DONE: outcome.is_last}
        if self.iteration:
            return {RESULT_DUPLICATE: True, DONE: True}
        return {**outcome.metrics, DONE: True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the state at the last report, in hydra-tune's format, and a ticket for it."""
        assert self._client is not None
        ticket = self._client.save(Path(checkpoint_dir) / FOLDER)
        (Path(checkpoint_dir) / _TICKET).write_text(json.dumps(asdict(ticket)))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from there at the next step."""
        folder = Path(checkpoint)
        try:
            ticket = Ticket(**json.loads((folder / _TICKET).read_text()))
            self._wanted = read_files(folder / FOLDER), ticket
        except (OSError, ValueError, TypeError) as error:
            raise TrialError(f"{str(folder)!r} is no checkpoint of a trial in a pool: {error}") from error
        self._reset = True
        if ticket.number > self.iteration:
            _LOGGER.warning(
                "%s is to go on from report %d, and the checkpoint that Ray has for that is of report %d: Ray has written a "
                "later one over it, as it may where a scheduler saves a trial that is being paused",
                self.trial_name,
                self.iteration,
                ticket.number,
            )

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial, or the same with another config, at the next step."""
        self._drawn = new_config
        self._wanted, self._reset = None, True
        return True

    def cleanup(self) -> None:
        """Have the pool drop what it trains."""
        if self._client is not None:
            self._client.leave()

    def _go_on(self) -> None:
        """Take the trial to a pool, unless it waits in one just so."""
        before, self._client, self._reset = self._client, None, False
        digest = _digest(self._drawn)
        files, ticket = self._wanted or (None, None)
        self._wanted = None
        if before is not None and ticket is not None and before.is_at(ticket) and ticket.config == digest:
            self._client = before
            return
        if before is not None:
            before.leave()
        request = Begin(
            trial_id=self.trial_id,
            key=f"{self.trial_id}-{uuid.uuid4().hex[:8]}",
            name=self.trial_name,
            build=self.settings.build,
            config=self._drawn,
            files=None if files is None else ray.put(files),
            is_changed=ticket is not None and ticket.config != digest,
            number=0 if ticket is None else ticket.number,
            lease_seconds=self.settings.lease_seconds,
        )
        self._client = Client(self.settings.directory, request, digest)
        self._client.begin(ticket if ticket is not None and ticket.config == digest else None)


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode()).hexdigest()
