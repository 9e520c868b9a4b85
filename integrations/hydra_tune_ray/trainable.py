"""`trainable`: a Ray Tune trainable whose trials train in shared pools.

Each trial runs in a process of Ray that computes nothing: the process takes its task to a pool, and each `step` of Ray is one
report of the task in the pool. The process must not import torch. People import `trainable` from `hydra_tune_ray` and give the
returned class to `ray.tune.Tuner`; `sweep.py` does so for each sweep on a cluster. Ray calls the methods of `PoolTrainable`, in
the trial's process.

Note: Ray's calls and the pool. `step` answers the last report and waits for the next. Between two steps the trial waits in
the pool, and so never runs ahead of Ray. `save_checkpoint` writes the state of the waiting or ended trial, and a ticket, or
a note if the trial has pruned itself. `load_checkpoint` reads the files, and like `reset_config` asks the pool for nothing
yet. The next `step` continues the trial in place, if the trial still waits at the ticket's report with the same config;
else the trial resumes from the files. `cleanup` ends the trial. A trial saved at this very report, as when Ray pauses
the trial, is left to its lease instead, so that another process may come with the ticket.
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
from hydra_tune_ray.checkpoint_transfer import FOLDER, NOTE, read_files
from hydra_tune_ray.client import TrialClient
from hydra_tune_ray.errors import TrialError
from hydra_tune_ray.messages import BeginRequest, Files, ReportOutcome, TrialTicket
from hydra_tune_ray.pickling import pickled
from hydra_tune_ray.pools import Pools, start_pools

CPUS = 0.01
"""CPU share of a trial in Ray's account; Ray refuses 0."""

_LOGGER = logging.getLogger("hydra_tune.ray")
_TICKET = "ticket.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSettings:
    """Settings shared by all trials of one `trainable`: the name of the directory of the pools, and the pickled `build`."""

    directory: str
    build: bytes
    lease_seconds: float


def trainable(
    build: Callable[..., Any], *, pools: Pools | None = None, lease_seconds: float = 30.0, **executor_options: Any
) -> type[Trainable]:
    """Make a class for `ray.tune.Tuner` whose trials train in pools.

    Args:
        build: builds a `TrainTask` from Ray's sample: `build(config)`; `build(*, lr, width)` with the names of
            `param_space`; or an objective as for `hydra_tune_optuna`, whose `suggest_` calls are answered with Ray's
            sample.
        pools: pools to train in; None: `start_pools(**executor_options)`, which end with this program.
        lease_seconds: how long a trial is still trained after its process has vanished, in seconds.
        executor_options: of the `HydraExecutor` of each node, e.g. `devices="cuda", device_memory="11GiB"`.

    Returns:
        The class. A trial takes 0.01 CPU of Ray's account; change the share with `ray.tune.with_resources`.

    Raises:
        ConfigError: an option that makes no sense; or no node has such devices.
        BuildPickleError: `build` cannot be sent to a pool; the message names the offending object.
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
    # Before the pools start, so that a function that cannot be sent costs no devices.
    data = pickled(build, "build")
    pools_in_use = start_pools(**executor_options) if pools is None else pools
    settings = TrainableSettings(directory=f"pools-{pools_in_use.name}", build=data, lease_seconds=lease_seconds)
    name = getattr(build, "__name__", None) or type(build).__name__
    # Ray makes each trial from the class and a config, so the settings travel as attributes of the class.
    return type(
        name, (PoolTrainable,), {"settings": settings, "pools": pools_in_use.name, "__doc__": PoolTrainable.__doc__}
    )


class PoolTrainable(Trainable):
    """A trial that trains in a pool; made by `hydra_tune_ray.trainable`."""

    settings: TrainableSettings
    pools: str

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:  # noqa: ARG003 - Ray's signature
        """Resources that a trial takes of Ray's account."""
        return PlacementGroupFactory([{"CPU": CPUS}])

    def setup(self, config: dict[str, Any]) -> None:
        """Note the config; training starts with the first step."""
        self._drawn = config
        self._wanted: tuple[Files, TrialTicket] | None = None
        self._client: TrialClient | None = None
        self._reset = False
        self._has_pruned_itself = False

    def step(self) -> dict[str, Any]:
        """Train until the next report."""
        if self._client is None or self._reset:
            self._go_on()
        assert self._client is not None
        outcome = self._client.next_report()
        if isinstance(outcome, ReportOutcome):
            return {**outcome.metrics, "step": outcome.step, "is_last": outcome.is_last, DONE: outcome.is_last}
        self._has_pruned_itself = outcome.status == "pruned"
        # Ray wants a result for every step: repeat the last one where the trial ended without a new report.
        if self.iteration:
            return {RESULT_DUPLICATE: True, DONE: True}
        return {**outcome.metrics, DONE: True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the state at the last report, with a ticket; a note if the trial has pruned itself."""
        assert self._client is not None
        if self._has_pruned_itself:
            # Ray saves every trial at its end by default, and would call this one failed.
            note = "The trial has pruned itself (on_bad_loss), and its state was not kept.\n"
            (Path(checkpoint_dir) / NOTE).write_text(note)
            return
        ticket = self._client.save(Path(checkpoint_dir) / FOLDER)
        (Path(checkpoint_dir) / _TICKET).write_text(json.dumps(asdict(ticket)))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Read a checkpoint, from which the next step resumes.

        Raises:
            TrialError: the folder is no checkpoint of a trial in a pool.
        """
        folder = Path(checkpoint)
        try:
            ticket = TrialTicket(**json.loads((folder / _TICKET).read_text()))
            # Read at once, because Ray may remove its folder after this call.
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
        """Switch to another trial, or to another config of the same trial, at the next step."""
        self._drawn = new_config
        self._wanted, self._reset = None, True
        return True

    def cleanup(self) -> None:
        """Tell the pool to end the trial, or to leave a trial saved at its last report to the lease."""
        if self._client is not None:
            self._client.leave()

    def _go_on(self) -> None:
        """Take the trial to a pool, unless the trial already waits in a pool at the wanted report, with the same config."""
        earlier_client, self._client, self._reset = self._client, None, False
        self._has_pruned_itself = False
        digest = _digest(self._drawn)
        files, ticket = self._wanted or (None, None)
        self._wanted = None
        if (
            earlier_client is not None
            and ticket is not None
            and earlier_client.is_at(ticket)
            and ticket.config == digest
        ):
            self._client = earlier_client
            return
        if earlier_client is not None:
            earlier_client.leave()
        # Files go through the object store, because the client may send the request again.
        request = BeginRequest(
            trial_id=self.trial_id,
            # A new key for every attempt, so that a late call of an earlier attempt cannot reach this one.
            key=f"{self.trial_id}-{uuid.uuid4().hex[:8]}",
            name=self.trial_name,
            build=self.settings.build,
            config=self._drawn,
            files=None if files is None else ray.put(files),
            is_changed=ticket is not None and ticket.config != digest,
            number=0 if ticket is None else ticket.number,
            lease_seconds=self.settings.lease_seconds,
        )
        self._client = TrialClient(self.settings.directory, request, digest)
        # With another config the waiting trial has the wrong task: begin from the files then.
        self._client.begin(ticket if ticket is not None and ticket.config == digest else None)


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode()).hexdigest()
