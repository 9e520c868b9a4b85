"""HYDRA's evaluation as numbers: each function plays one figure or table and gives back plain data."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from baselines import (
    TrialCost,
    data_parallel_step_seconds,
    model_parallel_makespan,
    pipeline_makespan,
    task_parallel_makespan,
)
from hydra_cost import Machine, Model, bert, num_stages, scenario, shortened, stages

from hydra_tune.simulate import SimulationResult, simulate

NUM_DEVICES = 8
MOST_MICROBATCHES = 32
WAYS = {"recompute": False, "keep": True}
"""How a backward unit comes by its activations, and whether they are kept in host memory."""


@dataclass(frozen=True)
class Run:
    """How a set of models fared.

    Args:
        seconds: the makespan.
        utilisation: share of the devices' time spent computing, recomputing included.
    """

    seconds: float
    utilisation: float


@dataclass(frozen=True, kw_only=True)
class Points:
    """How much is simulated.

    Args:
        share: of each trial's steps.
        sizes: parameters of Figure 8's models; the paper's are not in its text.
        devices: Figure 9's.
        models: Figure 10's.
        batches: Table 3's.
        machines: for the sensitivity table.
        shared_bytes: Table 3 is also played with devices whose loads share so many bytes a second.
    """

    share: float = 1 / 20
    sizes: Sequence[float] = (2.5e8, 5e8, 1e9, 1.5e9, 2e9)
    devices: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
    models: Sequence[int] = (1, 2, 4, 6, 8, 10, 12, 14, 16)
    batches: Sequence[int] = (8, 16, 32)
    shared_bytes: Sequence[float] = (48e9,)
    machines: Mapping[str, Machine] = field(
        default_factory=lambda: {
            "as stated": Machine(),
            "30% of peak": Machine(flops=0.6 * Machine.flops),
            "70% of peak": Machine(flops=1.4 * Machine.flops),
            "links of 6 GB/s": Machine(link_bytes=6e9),
            "links of 3 GB/s": Machine(link_bytes=3e9),
            "SGD: no moments to load": Machine(state_bytes=4),
            "shards of even size": Machine(even_shards=True),
        }
    )


QUICK = Points(
    share=1 / 500,
    sizes=(2.5e8, 1e9),
    devices=(1, 2, 4, 8),
    models=(1, 4, 8, 16),
    batches=(32,),
    shared_bytes=(),
    machines={"as stated": Machine(), "links of 6 GB/s": Machine(link_bytes=6e9)},
)


def hydra(
    models: Sequence[Model],
    machine: Machine,
    num_devices: int = NUM_DEVICES,
    *,
    keep: bool,
    overlap: bool = True,
    write_back: bool = False,
    policy: str = "lrtf",
    timeline: int = 0,
) -> SimulationResult:
    played = scenario(list(models), machine, num_devices, keep=keep, overlap=overlap, write_back=write_back)
    return simulate(played, policy, timeline=timeline)


def model_parallelism(models: Sequence[Model], machine: Machine) -> float:
    """Seconds of all models one after the other: what everything is measured against."""
    trials = [stages(model, machine, num_stages(model, machine)) for model in models]
    return model_parallel_makespan(trials, NUM_DEVICES, bytes_per_second=machine.link_bytes)


def other_kinds(models: Sequence[Model], machine: Machine) -> dict[str, Run]:
    """All kinds of parallelism but HYDRA's, on all devices."""
    link = machine.link_bytes
    fewest = [stages(model, machine, num_stages(model, machine)) for model in models]
    all_devices = {
        again: [stages(model, machine, NUM_DEVICES, recompute=again) for model in models] for again in (0, 1)
    }
    whole = [stages(model, machine, 1) for model in models]

    def pipeline(microbatches: Callable[[Model], int], *, again: int = 0) -> Run:
        seconds = sum(
            pipeline_makespan([cost], NUM_DEVICES, num_microbatches=microbatches(model), bytes_per_second=link)
            for model, cost in zip(models, all_devices[again], strict=True)
        )
        return _run(seconds, all_devices[again])

    return {
        "model parallelism": _run(model_parallel_makespan(fewest, NUM_DEVICES, bytes_per_second=link), fewest),
        "model + task parallelism": _run(
            task_parallel_makespan(fewest, NUM_DEVICES, own_groups=True, bytes_per_second=link), fewest
        ),
        "model + data parallelism": _run(sum(_best_replicas(model, machine) for model in models), whole),
        "data parallelism, ZeRO-3": _run(
            sum(_replicated(cost, NUM_DEVICES, machine, sharded=True) for cost in whole), whole
        ),
        "pipeline, 8 microbatches": pipeline(lambda _: 8),
        "pipeline, 8, recomputing": pipeline(lambda _: 8, again=1),
        "pipeline, up to 32": pipeline(lambda model: min(model.batch, MOST_MICROBATCHES)),
    }


def _replicated(trial: TrialCost, num_replicas: int, machine: Machine, *, sharded: bool = False) -> float:
    return trial.num_steps * data_parallel_step_seconds(
        trial, num_replicas=num_replicas, sharded=sharded, bytes_per_second=machine.link_bytes
    )


def _best_replicas(model: Model, machine: Machine) -> float:
    """Seconds with as many replicas as is best; a replica holds all the state and its part of the batch."""
    times = []
    for num_replicas in (1, 2, 4):
        count = num_stages(replace(model, batch=model.batch // num_replicas), machine)
        if count * num_replicas <= NUM_DEVICES:
            times.append(_replicated(stages(model, machine, count), num_replicas, machine))
    return min(times)


def _run(seconds: float, trials: Sequence[TrialCost]) -> Run:
    return Run(seconds, sum(trial.compute_seconds for trial in trials) / (seconds * NUM_DEVICES))


def figure_7(models: Sequence[Model], points: Points) -> dict[str, dict[str, float]]:
    """12 models on 8 devices: speed-ups over model parallelism, and utilisation."""
    machine = Machine()
    models = [shortened(model, points.share) for model in models]
    runs = other_kinds(models, machine)
    for policy in ("lrtf_paper", "lrtf"):
        for way, keep in WAYS.items():
            result = hydra(models, machine, keep=keep, policy=policy)
            runs[f"HYDRA, {way}, {policy}"] = Run(result.makespan_seconds, result.utilisation)
    base = runs["model parallelism"].seconds
    return {name: {"speedup": base / run.seconds, "utilisation": run.utilisation} for name, run in runs.items()}


def most_sharp_can_do(models: Sequence[Model]) -> float:
    """The bound on the speed-up over model parallelism while a trial has one unit under way, transfers left aside."""
    machine = Machine()
    seconds = [model.steps * 3 * model.num_layers * model.layer_seconds(machine) for model in models]
    return sum(seconds) / max(*seconds, sum(seconds) / NUM_DEVICES)


def figure_8(points: Points) -> dict[str, Any]:
    """12 models of each size on 8 devices: times, that of the smallest under model parallelism being 1."""
    machine = Machine()
    times: dict[str, list[float]] = {"model parallelism": [], "HYDRA, recompute": [], "HYDRA, keep": []}
    for size in points.sizes:
        models = [shortened(bert(16, size), points.share)] * 12
        times["model parallelism"].append(model_parallelism(models, machine))
        for way, keep in WAYS.items():
            times[f"HYDRA, {way}"].append(hydra(models, machine, keep=keep).makespan_seconds)
    first = times["model parallelism"][0]
    return {
        "sizes": list(points.sizes),
        "times": {name: [seconds / first for seconds in row] for name, row in times.items()},
    }


def _speedups(cases: Sequence[tuple[int, int]], points: Points) -> dict[str, Any]:
    """Models of 250M parameters; for each case the number of models and that of devices."""
    machine = Machine()
    model = shortened(bert(32, 2.5e8), points.share)
    found: dict[str, Any] = {}
    for way, keep in WAYS.items():
        results = [hydra([model] * count, machine, devices, keep=keep) for count, devices in cases]
        base = [model_parallelism([model] * count, machine) for count, _ in cases]
        speedups = [seconds / result.makespan_seconds for seconds, result in zip(base, results, strict=True)]
        found[f"HYDRA, {way}"] = speedups
        found[f"utilisation, {way}"] = [result.utilisation for result in results]
    found["ideal: as many as the fewer"] = [float(min(case)) for case in cases]
    return found


def figure_9(points: Points) -> dict[str, Any]:
    """4 models of 250M parameters on 1 to 8 devices."""
    return {"devices": list(points.devices), **_speedups([(4, devices) for devices in points.devices], points)}


def figure_10(points: Points) -> dict[str, Any]:
    """1 to 16 models of 250M parameters on 8 devices."""
    return {"models": list(points.models), **_speedups([(count, NUM_DEVICES) for count in points.models], points)}


def table_3(points: Points) -> dict[str, dict[str, float]]:
    """16 models of 250M parameters on 8 devices: times, that of all of HYDRA being 1.

    Without SHARP one model after the other is trained, spilled, by one device, whose link is then all its own. Without
    double buffering, once as the simulator has it, where a device waits for what it loads; once where it also waits for
    what it writes back, which then takes its part of what is shared, too.
    """
    rows: dict[str, dict[str, float]] = {}
    for shared, batch in itertools.product((None, *points.shared_bytes), points.batches):
        machine = Machine(shared_bytes=shared)
        model = shortened(bert(batch, 2.5e8), points.share)
        for way, keep in WAYS.items():
            full = hydra([model] * 16, machine, keep=keep).makespan_seconds
            row = {"HYDRA": 1.0}
            for what, write_back in (("loads", False), ("loads and write-backs", True)):
                waits = partial(hydra, keep=keep, overlap=False, write_back=write_back)
                together = waits([model] * 16, machine).makespan_seconds
                alone = 16 * waits([model], machine, num_devices=1).makespan_seconds
                row[f"no buffer: {what} wait"] = together / full
                row[f"nor SHARP: {what} wait"] = alone / full
            rows[f"batch {batch}, {way}" + (f", {shared / 1e9:g} GB/s shared" if shared else "")] = row
    return rows


def sensitivity(models: Sequence[Model], points: Points) -> dict[str, dict[str, float]]:
    """Figure 7's speed-ups and utilisations on machines that differ from the one stated."""
    models = [shortened(model, points.share) for model in models]
    rows: dict[str, dict[str, float]] = {}
    for name, machine in points.machines.items():
        base, row = model_parallelism(models, machine), {}
        for way, keep in WAYS.items():
            result = hydra(models, machine, keep=keep)
            row[f"{way}: speedup"] = base / result.makespan_seconds
            row[f"{way}: utilisation"] = result.utilisation
        rows[name] = row
    return rows


def as_json(points: Points) -> dict[str, Any]:
    """What was simulated."""
    return asdict(replace(points, machines={}))
