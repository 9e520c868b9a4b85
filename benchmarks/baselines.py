"""Makespans of the same trials under other kinds of parallelism, as baselines for SHARP.

The module uses closed forms or short recurrences over a stated cost model, without a scheduler and without memory.
Every omission of the model favours the baselines: memory is never short, devices never wait for input data, links are
never shared, and a share of a minibatch takes exactly the same share of the minibatch's time.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra_tune.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCost:
    """Cost of one trial on identical devices, cut into K shards.

    Args:
        num_steps: optimizer steps, at least 1.
        forward_seconds: for each shard, seconds of the forward pass of a whole minibatch.
        backward_seconds: for each shard, seconds of the backward pass of a whole minibatch, with recomputation, if any,
            and update.
        boundary_bytes: for each of the K - 1 cuts, bytes that a whole minibatch sends across the cut in the forward
            pass; the backward pass sends as many back. Empty means none.
        parameter_bytes: for each shard, bytes of its parameters, and so of its gradients. Empty means none.

    Raises:
        ConfigError: no shards, a length that does not fit, or a number that makes no sense.
    """

    num_steps: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    boundary_bytes: tuple[int, ...] = ()
    parameter_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, not {self.num_steps}")
        num_shards = len(self.forward_seconds)
        if not num_shards:
            raise ConfigError("forward_seconds is empty, expected the seconds of at least 1 shard")
        lengths = {"backward_seconds": num_shards, "boundary_bytes": num_shards - 1, "parameter_bytes": num_shards}
        for name, expected in lengths.items():
            num_entries = len(getattr(self, name))
            if num_entries != expected and (num_entries or name == "backward_seconds"):
                raise ConfigError(f"{name} has {num_entries} entries, expected {expected} for {num_shards} shards")
        for name in ("forward_seconds", "backward_seconds"):
            _check_positive(name, getattr(self, name))
        for name in ("boundary_bytes", "parameter_bytes"):
            if min(getattr(self, name), default=0) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")

    @property
    def num_shards(self) -> int:
        """Number of shards, K."""
        return len(self.forward_seconds)

    @property
    def compute_seconds(self) -> float:
        """Seconds of all units of all steps, on one device, without any transfer."""
        return self.num_steps * (math.fsum(self.forward_seconds) + math.fsum(self.backward_seconds))


def model_parallel_step_seconds(trial: TrialCost, *, bytes_per_second: float = math.inf) -> float:
    """Seconds of one step with each shard on a device of its own, and one device at work at any time.

    Returns:
        sum of forward and backward over all shards + 2 * (bytes across all cuts) / bandwidth.

    Source:
        HYDRA (Nagrecha and Kumar), Figure 1A, "regular model parallelism": the paper's unit of comparison.
    """
    _check_positive("bytes_per_second", (bytes_per_second,))
    transfers = 2 * sum(trial.boundary_bytes) / bytes_per_second
    return math.fsum(trial.forward_seconds) + math.fsum(trial.backward_seconds) + transfers


def pipeline_step_seconds(trial: TrialCost, *, num_microbatches: int, bytes_per_second: float = math.inf) -> float:
    """Seconds of one step with each shard on a device of its own, and the minibatch sent through in m microbatches.

    All forwards run first, in order; then all backwards, the last microbatch first. Each device starts its next
    microbatch as soon as both the device and the input are ready; transfers overlap compute. The update waits for the
    last microbatch, so no step overlaps the next.

    Returns:
        The end of the recurrence end(i, k) = max(end(i-1, k), end(i, k-1) + bytes_k / m / bandwidth) + seconds_k / m,
        forwards and then backwards. For equal shards without transfers the end is (m + K - 1) / m * (forward +
        backward) of one shard: a share (K - 1) / (m + K - 1) of every device's time is idle.

    Source:
        Huang et al., GPipe (2019), section 2.3 and Figure 2.

    Raises:
        ConfigError: fewer than 1 microbatch, or a bandwidth that is not positive.
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be at least 1, not {num_microbatches}")
    _check_positive("bytes_per_second", (bytes_per_second,))
    boundary_bytes = trial.boundary_bytes or (0,) * (trial.num_shards - 1)
    hops = [size / num_microbatches / bytes_per_second for size in boundary_bytes]
    free = [0.0] * trial.num_shards
    forward = [seconds / num_microbatches for seconds in trial.forward_seconds]
    backward = [seconds / num_microbatches for seconds in trial.backward_seconds]
    for _ in range(num_microbatches):
        _send_through(range(trial.num_shards), free, forward, hops)
    for _ in range(num_microbatches):
        _send_through(range(trial.num_shards - 1, -1, -1), free, backward, hops)
    return max(free)


def data_parallel_step_seconds(
    trial: TrialCost, *, num_replicas: int, sharded: bool = False, bytes_per_second: float = math.inf
) -> float:
    """Seconds of one step with R replicas that share the minibatch evenly, each model-parallel over K devices.

    Gradients are summed after the backward pass, each shard's among its R holders, all shards at once.

    Args:
        trial: the trial; with one shard this is plain data parallelism.
        num_replicas: R, at least 1.
        sharded: replicas keep 1/R of the parameters each and gather the rest, once for the forward and once for the
            backward pass (ZeRO, stage 3).
        bytes_per_second: of each link.

    Returns:
        model-parallel step / R + 2 * (R - 1) / R * (bytes of the largest shard) / bandwidth, by a ring; sharded, 3 in
        place of 2.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009); Rajbhandari et
        al., ZeRO (2020), section 7.

    Raises:
        ConfigError: fewer than 1 replica, or a bandwidth that is not positive.
    """
    if num_replicas < 1:
        raise ConfigError(f"num_replicas must be at least 1, not {num_replicas}")
    compute = model_parallel_step_seconds(trial, bytes_per_second=bytes_per_second) / num_replicas
    # A ring's reduce-scatter and all-gather each send (R - 1) / R of the bytes; sharded, the parameters are gathered
    # twice.
    rounds = (3 if sharded else 2) * (num_replicas - 1) / num_replicas
    return compute + rounds * max(trial.parameter_bytes, default=0) / bytes_per_second


def model_parallel_makespan(
    trials: Sequence[TrialCost], num_devices: int, *, bytes_per_second: float = math.inf
) -> float:
    """Makespan of all trials one after the other, each model-parallel; seconds.

    Raises:
        ConfigError: a trial with more shards than there are devices, or arguments that make no sense.
    """
    _check_fits(trials, num_devices)
    return math.fsum(
        trial.num_steps * model_parallel_step_seconds(trial, bytes_per_second=bytes_per_second) for trial in trials
    )


def pipeline_makespan(
    trials: Sequence[TrialCost], num_devices: int, *, num_microbatches: int, bytes_per_second: float = math.inf
) -> float:
    """Makespan of all trials one after the other, each a pipeline with one stage per shard; seconds.

    Raises:
        ConfigError: a trial with more shards than there are devices, or arguments that make no sense.
    """
    _check_fits(trials, num_devices)
    return math.fsum(
        trial.num_steps
        * pipeline_step_seconds(trial, num_microbatches=num_microbatches, bytes_per_second=bytes_per_second)
        for trial in trials
    )


def data_parallel_makespan(
    trials: Sequence[TrialCost], num_devices: int, *, sharded: bool = False, bytes_per_second: float = math.inf
) -> float:
    """Makespan of all trials one after the other, each with as many replicas as the devices hold; seconds.

    Raises:
        ConfigError: a trial with more shards than there are devices, or arguments that make no sense.
    """
    _check_fits(trials, num_devices)
    return math.fsum(
        trial.num_steps
        * data_parallel_step_seconds(
            trial,
            num_replicas=num_devices // trial.num_shards,
            sharded=sharded,
            bytes_per_second=bytes_per_second,
        )
        for trial in trials
    )


def task_parallel_makespan(
    trials: Sequence[TrialCost], num_devices: int, *, own_groups: bool = False, bytes_per_second: float = math.inf
) -> float:
    """Makespan of whole trials side by side, longest first, each model-parallel within a group of devices; seconds.

    With trials of one shard this is plain task parallelism: one trial per device.

    Args:
        trials: all trials.
        num_devices: devices, at least 1.
        own_groups: each trial takes one device per shard, earliest free first. Otherwise groups are fixed, of the size
            of the largest number of shards, and left-over devices stay idle.
        bytes_per_second: of each link.

    Raises:
        ConfigError: a trial with more shards than there are devices, or arguments that make no sense.
    """
    _check_fits(trials, num_devices)
    seconds = [
        trial.num_steps * model_parallel_step_seconds(trial, bytes_per_second=bytes_per_second) for trial in trials
    ]
    if not own_groups:
        num_groups = num_devices // max((trial.num_shards for trial in trials), default=1)
        return longest_first_makespan(seconds, num_groups)
    free = [0.0] * num_devices
    for length, trial in sorted(zip(seconds, trials, strict=True), key=lambda pair: -pair[0]):
        free.sort()
        # A trial starts when the last of its devices is free.
        free[: trial.num_shards] = [free[trial.num_shards - 1] + length] * trial.num_shards
    return max(free)


def longest_first_makespan(job_seconds: Iterable[float], num_devices: int) -> float:
    """Makespan of whole jobs, longest first, each on the device that is free first (LPT); seconds.

    At most 4/3 - 1 / (3 * num_devices) of the best makespan of whole jobs.

    Source:
        Graham, Bounds on Multiprocessing Timing Anomalies (1969).

    Raises:
        ConfigError: a time that is not a positive number, or fewer than 1 device.
    """
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    jobs = sorted(job_seconds, reverse=True)
    _check_positive("job_seconds", jobs)
    ends = [0.0] * num_devices
    for seconds in jobs:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One task of Harmony's pipeline.

    Args:
        kind: `"forward"`, `"backward"` or `"update"`.
        layer: from 0.
        microbatch: from 0; None for an update, since one update serves all microbatches.
        device: from 0.
        start_seconds: start of the task.
        seconds: duration of the task.
    """

    kind: str
    layer: int
    microbatch: int | None
    device: int
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """End of the task, in seconds."""
        return self.start_seconds + self.seconds


def harmony_step(
    *, num_layers: int, num_devices: int, num_microbatches: int, task_seconds: float = 1.0
) -> list[LayerRun]:
    """Schedule one step of Harmony's virtualised pipeline over identical layers.

    Layers are dealt to the devices in turn, so that activations pass from device to device. Each layer runs all
    microbatches before its device starts the next layer (input-batch grouping), and is updated right after its last
    backward (just in time): per step a layer's weights are loaded twice and written back once, 3|W|.

    Args:
        num_layers: layers, at least 1.
        num_devices: devices, at least 1.
        num_microbatches: microbatches, at least 1.
        task_seconds: the time of a forward, a backward or an update of one layer, the same for all.

    Returns:
        Every task, sorted by start and device.

    Source:
        Li et al., Doing more with less (HotOS 2021), section 3 and Figure 4.

    Differs:
        The figure itself was not at hand, only its caption and the text. The order of the backwards, with microbatches
        as in the forwards, is an assumption.

    Raises:
        ConfigError: a number below 1, or a time that is not positive.
    """
    sizes = {"num_layers": num_layers, "num_devices": num_devices, "num_microbatches": num_microbatches}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    _check_positive("task_seconds", (task_seconds,))
    runs: list[LayerRun] = []
    device_free = [0.0] * num_devices
    inputs_ready = [0.0] * num_microbatches

    def run(kind: str, layer: int, microbatch: int | None) -> None:
        device = layer % num_devices
        ready = 0.0 if microbatch is None else inputs_ready[microbatch]
        start = max(device_free[device], ready)
        task = LayerRun(
            kind=kind, layer=layer, microbatch=microbatch, device=device, start_seconds=start, seconds=task_seconds
        )
        runs.append(task)
        device_free[device] = task.end_seconds
        if microbatch is not None:
            inputs_ready[microbatch] = task.end_seconds

    for layer in range(num_layers):
        for microbatch in range(num_microbatches):
            run("forward", layer, microbatch)
    # `inputs_ready` goes on from the forwards: a microbatch's first backward waits for its last forward.
    for layer in reversed(range(num_layers)):
        for microbatch in range(num_microbatches):
            run("backward", layer, microbatch)
        run("update", layer, None)
    return sorted(runs, key=lambda task: (task.start_seconds, task.device))


def _send_through(stages: Sequence[int], free: list[float], seconds: Sequence[float], hops: Sequence[float]) -> None:
    """Send one microbatch through all stages in turn, updating in `free` the time at which each stage is free."""
    # Also for a backward: its first stage is free only after the stage's last forward, whose output it needs.
    ready = 0.0
    for position, stage in enumerate(stages):
        if position:
            # Cut k lies between shards k and k + 1, in either direction.
            ready += hops[min(stage, stages[position - 1])]
        ready = free[stage] = max(ready, free[stage]) + seconds[stage]


def _check_fits(trials: Sequence[TrialCost], num_devices: int) -> None:
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    most = max((trial.num_shards for trial in trials), default=0)
    if most > num_devices:
        raise ConfigError(
            f"a trial has {most} shards, each on a device of its own, but there are {num_devices} devices; "
            "cut it into fewer shards or give more devices"
        )


def _check_positive(name: str, values: Iterable[float]) -> None:
    for value in values:
        # In this form, NaN is refused as well.
        if not value > 0:
            raise ConfigError(f"{name} must be positive, not {value}")
