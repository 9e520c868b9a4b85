"""`ExecutorSettings`: the checked options of an executor, and the start of a pool from these options.

`HydraExecutor` (`hydra_tune/executor.py`) makes the settings when the executor is made, and calls `open_pool` at the
first use. With `isolate=True`, the copy of the executor in the pool's process calls `number_log`, and then `open_pool`.
Making the settings opens no device, locks no folder and starts no thread; `open_pool` does. A missing folder for
checkpoints is made with the settings. No other module of `pool/runtime/` may set fusion up, and the settings must not
decide how groups form. `HydraExecutor` calls `open_pool` under the executor's lock, so that a pool is opened once. The
settings themselves have no lock.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from hydra_tune import __version__
from hydra_tune.checkpoint.every import CheckpointInterval
from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.discovery import open_devices, open_planned_devices
from hydra_tune.errors import ConfigError
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChooser
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.host.spill_dir import SpillFolder, check_spill_dir
from hydra_tune.observe.event_log.writer import EventLog, check_log_path
from hydra_tune.pool.checkpointing.writer import PoolCheckpointWriter, check_saving
from hydra_tune.pool.faults.loader_watchdog import LoaderWaitLimits, check_loader_times
from hydra_tune.pool.faults.retry import check_retries
from hydra_tune.pool.fusion.fused_pool import FusedPool
from hydra_tune.pool.pool import Pool
from hydra_tune.pool.runtime.cut_budget import budget_of
from hydra_tune.pool.runtime.option_checks import (
    check_compiler_acts,
    check_counts,
    check_flag,
    check_fusion_acts,
    check_memory,
    check_placement,
    check_planner,
    checked_backend,
    members_of_group,
)
from hydra_tune.pool.runtime.recorder import PoolRecorder
from hydra_tune.quantities import parse_bytes
from hydra_tune.schedule import Policy, check_admission, make_policy
from hydra_tune.shard.partition.partitioner import NumShards
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.supervision.supervisor import numbered

_HOST_SHARE = 0.8  # share of the host memory that devices leave free, to use without host_memory
_LEAST_HOST_SHARE = 0.2  # the same, of all free host memory, where a device_memory leaves little


@dataclass(slots=True, kw_only=True)
class ExecutorSettings:
    """Options of `HydraExecutor`, with the same names and meanings, and the values derived from them.

    Attributes:
        members: the largest number of trials in a group; 0 without fusion.
        saving: the folder for checkpoints, and how often checkpoints are made.

    Raises:
        ConfigError: an option is invalid; the error names the option.
    """

    devices: str
    device_memory: str | int | None
    host_memory: str | int | None
    policy: str | Policy
    buffer_fraction: float | Literal["auto"]
    max_concurrent: int | None
    num_shards: NumShards
    instrument: Callable[[], AbstractContextManager[Any]] | None
    admission: Literal["auto", "eager", "staggered"]
    link_bandwidth: str | int | None
    record: bool
    optimizer_placement: Literal["device", "host", "auto"]
    spill_dir: str | os.PathLike[str] | None
    event_log: str | os.PathLike[str] | None
    event_log_limit: str | int | None
    plans_only: bool
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_every: str | int | None
    loader_warning: str | float
    loader_timeout: str | float | None
    max_retries: int
    fusion: Literal["off", "on", "auto"]
    fusion_size: int
    fusion_compile: str | None
    fusion_planner: Literal["off", "on", "auto"]
    members: int = field(init=False)
    saving: tuple[Path | None, CheckpointInterval] = field(init=False)
    _chosen: Policy = field(init=False)
    _host_bytes: int | None = field(init=False)
    _loader_times: LoaderWaitLimits = field(init=False)
    _log_path: Path | None = field(init=False)
    _log_limit: int | None = field(init=False)
    _spill_path: Path | None = field(init=False)

    def __post_init__(self) -> None:
        # Options are checked before any device is opened or folder is locked, so a mistake costs nothing. Only checks that
        # need the devices wait for `open_pool`.
        if not isinstance(self.devices, str):
            raise ConfigError(f"devices must be a text such as 'auto', 'cuda' or 'cpu:2', not {self.devices!r}")
        buffer = self.buffer_fraction
        if buffer != "auto" and not (isinstance(buffer, int | float) and 0 <= buffer < 1):
            raise ConfigError(f"buffer_fraction must be 'auto', or from 0 to below 1, not {buffer!r}")
        check_counts(self.max_concurrent, self.num_shards)
        check_admission(self.admission)
        if self.instrument is not None and not callable(self.instrument):
            raise ConfigError(f"instrument must be callable, not {self.instrument!r}")
        check_memory(self.device_memory, self.link_bandwidth)
        check_flag("record", self.record)
        check_placement(self.optimizer_placement, self.spill_dir)
        self.members = members_of_group(self.fusion, self.fusion_size)
        checked_backend("fusion_compile", self.fusion_compile)
        check_planner(self.fusion_planner)
        check_fusion_acts(
            self.fusion,
            fusion_size=self.fusion_size,
            fusion_compile=self.fusion_compile,
            fusion_planner=self.fusion_planner,
        )
        self._log_path = None if self.event_log is None else check_log_path(self.event_log)
        limit = self.event_log_limit
        self._log_limit = None if limit is None else parse_bytes(limit, what="event_log_limit")
        self.saving = check_saving(self.checkpoint_dir, self.checkpoint_every)
        self._loader_times = check_loader_times(self.loader_warning, self.loader_timeout)
        check_retries(self.max_retries)
        self._host_bytes = None if self.host_memory is None else parse_bytes(self.host_memory, what="host_memory")
        self._spill_path = None if self.spill_dir is None else check_spill_dir(self.spill_dir)
        self._chosen = make_policy(self.policy)

    def check_isolated(self) -> None:
        """Refuse options that are unavailable where the pool runs in a process of its own.

        Raises:
            ConfigError: an unavailable option is given; the error names the option.
        """
        for name, is_given, why in (
            (
                "fusion",
                self.members > 0,
                "trials that are computed together crash together, and nobody could say which did",
            ),
            ("record", self.record, "the recording stays in the pool's process; event_log holds most of the same"),
            ("instrument", self.instrument is not None, "its data stays in the pool's process"),
            ("plans_only", self.plans_only, "an isolated pool makes no forecasts"),
        ):
            if is_given:
                raise ConfigError(f"{name} does not go with isolate=True: {why}; leave one of the two out")

    def check_loops(self) -> None:
        """Refuse options under which a loop of the user's own cannot run.

        Raises:
            ConfigError: such an option is given; the error names the option.
        """
        for name, is_given in (
            ("fusion", self.members > 0),
            ("num_shards", self.num_shards is not None),
            ("optimizer_placement", self.optimizer_placement == "host"),
        ):
            if is_given:
                raise ConfigError(
                    f"a loop of your own always runs whole and by itself, and {name}={getattr(self, name)!r} asks for "
                    f"something else; leave {name} out, or describe the training with a TrainTask"
                )

    def number_log(self, crashes: int) -> None:
        """Give the event log a file of its own, in a process that follows crashed processes."""
        self._log_path = numbered(self._log_path, crashes)

    def _free_host_bytes(self, devices: Sequence[Device]) -> int:
        free = psutil.virtual_memory().available
        # CPU devices hold their blocks in the same memory, unless they stand for the GPUs of a plan.
        in_use = 0 if self.devices.startswith("cuda") else sum(each.budget_bytes for each in devices if each.is_host)
        return int(max((free - in_use) * _HOST_SHARE, free * _LEAST_HOST_SHARE))

    def open_pool(self) -> tuple[Pool, FusedPool | None, int]:
        """Open the devices and start a pool.

        Returns:
            The pool; the former of fused groups, or None; and the number of trials in flight, a group counted as one.

        Raises:
            ConfigError: a device or folder does not exist or cannot be used, a memory option does not suit the devices, or
                the compiler of `fusion_compile` acts on no device.
        """
        opening = open_planned_devices if self.plans_only else open_devices
        with ExitStack() as opened:  # closed again if a later step fails
            devices = opening(self.devices, self.device_memory, self.link_bandwidth)
            for device in devices:
                opened.callback(device.close)
            if not self.plans_only:  # CPU devices may stand in for GPUs then
                check_compiler_acts(self.fusion_compile, devices)
            width = self.max_concurrent or 2 * len(devices)
            host_bytes = self._host_bytes or self._free_host_bytes(devices)
            library = PlanLibrary(
                budget_of(
                    devices,
                    trials=width,
                    host_bytes=host_bytes,
                    buffer_fraction=self.buffer_fraction,
                    num_shards=self.num_shards,
                    optimizer_placement=self.optimizer_placement,
                    stand_for_gpus=self.devices.startswith("cuda"),
                )
            )
            host = None
            if self._spill_path is not None:
                # Checked again: the folder may have changed since the executor was made.
                host = HostTier(host_bytes, SpillDisk(SpillFolder(check_spill_dir(self._spill_path))), devices[0])
                opened.callback(host.close)
            pool = Pool(
                devices,
                library,
                self._chosen,
                max_concurrent=width,
                host_bytes=host_bytes,
                instrument=self.instrument,
                admission=self.admission,
                recorder=PoolRecorder(devices, self._policy_name, width, self.admission) if self.record else None,
                host=host,
                # Prefetched blocks need the reserved buffer.
                sends_ahead=self.buffer_fraction != 0,
                log=None if self._log_path is None else self._log_to(self._log_path, devices, width),
                checkpoints=PoolCheckpointWriter(*self.saving, host),
                loader_times=self._loader_times,
            )
            opened.pop_all()
        return pool, self._groups_of(pool, library), width

    def _groups_of(self, pool: Pool, library: PlanLibrary) -> FusedPool | None:
        if not self.members:
            pool.hint_at_fusion()
            return None
        chooser = GroupSizeChooser(library) if self.fusion == "auto" else None
        return FusedPool(pool, library, self.members, chooser, self.fusion_compile, self.fusion_planner)

    @property
    def _policy_name(self) -> str:
        return self.policy if isinstance(self.policy, str) else type(self.policy).__name__

    def _log_to(self, path: Path, devices: Sequence[Device], width: int) -> EventLog:
        facts = {
            "hydra_tune": __version__,
            "policy": self._policy_name,
            "admission": self.admission,
            "max_concurrent": width,
        }
        budgets = [(device.name, device.budget_bytes) for device in devices]
        return EventLog(path, budgets, facts, limit_bytes=self._log_limit)
