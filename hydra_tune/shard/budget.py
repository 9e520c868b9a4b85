"""`Budget`: what plans are cut for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hydra_tune.devices.link import Link
from hydra_tune.shard.activations import Room
from hydra_tune.shard.partition import NumShards
from hydra_tune.shard.placement import OptimizerPlacement, Speeds

_BUFFERS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)  # of a device's memory, for "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What plans are cut for.

    Args:
        budget_bytes: memory of the smallest device.
        buffer_fraction: part of it kept free next to a running shard; nothing is kept where the whole model fits. "auto": as
            little as the parameters of any shard need, so that all that comes next can be sent ahead.
        alignment: bytes to which the devices align allocations.
        num_shards: see `Partitioner.partition`.
        optimizer_placement: where optimizer state stays and updates are made; "auto": see `placement.py`.
        speeds: of the machine, which "auto" asks for.
        trials: trials in flight for each device.
        host_bytes: host memory for each trial in flight; None for as much as it likes.
        link: how fast the devices' copies are, if that can be compared with seconds measured on the host.
        checks_sample: whether a plan may be checked with a few samples of its batch; see `sample.py`.
        counts_draws: whether a batch draws as many random numbers on each device, so that later ones can be drawn before it.
        host_threads: intra-op threads to check plans with, which changes nothing but the time that takes.
    """

    budget_bytes: int
    buffer_fraction: float | Literal["auto"]
    alignment: int
    num_shards: NumShards = None
    optimizer_placement: OptimizerPlacement | Literal["auto"] = "device"
    speeds: Callable[[], Speeds] | None = None
    trials: int = 1
    host_bytes: int | None = None
    link: Callable[[], Link | None] = lambda: None
    checks_sample: bool = False
    counts_draws: bool = True
    host_threads: int = 1

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes that could be kept free next to a running shard, the least first."""
        tried = _BUFFERS if self.buffer_fraction == "auto" else (self.buffer_fraction,)
        return tuple(int(self.budget_bytes * fraction) for fraction in tried)

    @property
    def sends_ahead(self) -> bool:
        """Whether what comes next is sent to a device while it computes."""
        return self.buffer_fraction != 0

    def room(self, buffer_bytes: int) -> Room:
        """What there is to keep activations in, beside a buffer."""
        return Room(
            capacity_bytes=self.budget_bytes - buffer_bytes,
            budget_bytes=self.budget_bytes,
            trials=self.trials,
            host_bytes=self.host_bytes,
        )
