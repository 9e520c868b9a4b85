"""What `hydra-tune plan` says of a sweep's configurations, against what they do when they are trained.

    python benchmarks/plan.py examples/digits/space.yaml             # three configurations
    python benchmarks/plan.py examples/digits/space.yaml --trials 6
    python benchmarks/plan.py examples/*/space.yaml --kinds          # each kind of bytes as well

Each configuration is planned in a pool of its own, and trained in another one, alone and as it is but for the number of epochs,
with the options that the sweep file gives. A row is one configuration:

- `peak`: the most bytes taken on any device, planned and counted (evaluations included);
- `bytes`: moved in an optimizer step, all kinds and ways, and which kind is furthest off, in percent of all bytes. Counted are
  steps after the second, but for those with an evaluation before them;
- `step`: seconds from the end of an optimizer step to the end of the next one, planned, and the median of the same steps.

Seconds want a machine that does nothing else. Exits with 1 if peak bytes are off by more than 5%, bytes of any kind by more
than 2% of all bytes, or seconds by more than 25%.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402 - needs the path above
from hydra_tune.cli.dry_run.sampling import sample  # noqa: E402
from hydra_tune.cli.run.sweep_run import opened  # noqa: E402
from hydra_tune.cli.run.task_building import TaskBuilder  # noqa: E402
from hydra_tune.cli.run.task_ref import load_task  # noqa: E402
from hydra_tune.cli.sweep_file.reader import read_sweep_file  # noqa: E402
from hydra_tune.pool.dry_run.report import PoolForecast  # noqa: E402

WARM_STEPS = 2
MOST_PEAK, MOST_BYTES, MOST_SECONDS = 5.0, 2.0, 25.0  # percent
Bytes = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a run has done.

    Attributes:
        peak_bytes: the most taken on any device.
        moved: bytes of a step by kind and way.
        step_seconds: the median of the steps.
        steps: steps that were counted.
    """

    peak_bytes: int
    moved: Bytes
    step_seconds: float
    steps: int


def trained(make: Any, task: TrainTask, units_per_step: int) -> Counted:
    """Train a task alone in a pool, and read its event log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        with make(event_log=log) as pool:
            (result,) = pool.run([task])
            if result.error is not None:
                raise result.error
            peak_bytes = max(device.peak_bytes for device in pool.stats().devices.values())
        events = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    moved: Counter[str] = Counter()
    seconds = []
    for start_ns, end_ns in _steps([event for event in events if event["event"] == "unit"], units_per_step):
        seconds.append((end_ns - start_ns) / 1e9)
        for event in events:
            if event["event"] == "copy" and start_ns < event["end_ns"] <= end_ns:
                moved[f"{event['kind']} {event['what']}"] += event["bytes"]
    return Counted(
        peak_bytes=peak_bytes,
        moved={key: nbytes / len(seconds) for key, nbytes in moved.items()},
        step_seconds=statistics.median(seconds),
        steps=len(seconds),
    )


def _steps(units: list[dict[str, Any]], units_per_step: int) -> Iterator[tuple[int, int]]:
    """When each step has begun and ended, by the ends of last units; without those that come after an evaluation or a burst."""
    ends: list[int | None] = []
    count = 0
    for unit in sorted(units, key=lambda unit: unit["end_ns"]):
        if unit["kind"] in ("evaluate", "burst"):  # a burst runs the trial's own code, here before the first step
            assert not count, f"{unit['kind']} in the middle of a step"
            ends.append(None)
            continue
        count += 1
        if count == units_per_step:
            ends.append(unit["end_ns"])
            count = 0
    for before, after in list(pairwise(ends))[WARM_STEPS - 1 :]:
        if before is not None and after is not None:
            yield before, after


def _shortened(task: TrainTask, epochs: int) -> TrainTask:
    return replace(task, epochs=min(task.epochs, epochs))


def _ways(forecast: PoolForecast) -> Bytes:
    ways = {"in": forecast.bytes_in, "out": forecast.bytes_out, "across": forecast.bytes_across}
    return {f"{kind} {way}": nbytes for way, kinds in ways.items() for kind, nbytes in kinds.items()}


def _percent(planned: float, counted: float) -> float:
    return 100 * (planned / counted - 1) if counted else 0.0 if not planned else float("inf")


def _show(name: str, params: Mapping[str, Any], forecast: PoolForecast, counted: Counted, *, kinds: bool) -> bool:
    """Print one configuration; whether it is off by too much."""
    (trial,) = forecast.trials
    peak_bytes = max(device.peak_bytes for device in forecast.devices.values())
    foreseen = _ways(forecast)
    total = sum(counted.moved.values())
    off = {
        key: 100 * (foreseen.get(key, 0.0) - counted.moved.get(key, 0.0)) / max(total, 1.0)
        for key in sorted({*foreseen, *counted.moved})
    }
    worst = max(off, key=lambda key: abs(off[key]), default="-")
    offs = (
        _percent(peak_bytes, counted.peak_bytes),
        off.get(worst, 0.0),
        _percent(trial.step_seconds, counted.step_seconds),
    )
    shards = "whole" if trial.is_whole else str(trial.num_shards)
    print(
        f"{name:<30} {shards:>6} {peak_bytes:>11,} {counted.peak_bytes:>11,} {offs[0]:>+6.2f}% "
        f"{sum(foreseen.values()):>12,.0f} {total:>12,.0f} {offs[1]:>+6.2f}% {worst:<15} "
        f"{1e3 * trial.step_seconds:>8.2f} {1e3 * counted.step_seconds:>8.2f} {offs[2]:>+6.1f}%  {counted.steps:>4}",
        flush=True,
    )
    for key in off if kinds else ():
        print(
            f"    {key:<40} {foreseen.get(key, 0.0):>12,.0f} {counted.moved.get(key, 0.0):>12,.0f} {off[key]:>+6.2f}%"
        )
    if kinds:
        print("    " + ", ".join(f"{key}={value}" for key, value in params.items()))
    return abs(offs[0]) > MOST_PEAK or abs(offs[1]) > MOST_BYTES or abs(offs[2]) > MOST_SECONDS


def main() -> int:
    """Print the table; 0 if all is within the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="sweep files")
    parser.add_argument("--trials", type=int, default=3, help="configurations of each  [3]")
    parser.add_argument("--epochs", type=int, default=2, help="of each run at most  [2]")
    parser.add_argument("--seed", type=int, default=0, help="of the draws  [0]")
    parser.add_argument("--kinds", action="store_true", help="each kind of bytes as well")
    given, missed = parser.parse_args(), 0
    torch.set_num_threads(1)
    print(f"{'':<37} {'peak bytes':^31} {'bytes of a step':^49} {'ms of a step':^25}")
    counted_twice = f"{'planned':>8} {'counted':>8} {'off':>7}"
    print(
        f"{'sweep':<30} {'shards':>6} {'planned':>11} {'counted':>11} {'off':>7} {'planned':>12} {'counted':>12} {'off':>7} "
        f"{'of':<15} {counted_twice} {'steps':>5}"
    )
    for file in given.files:
        spec = read_sweep_file(file)
        assert spec.parameters is not None, "plan wants parameters:"
        build = TaskBuilder(spec=spec, function=load_task(spec))
        for number, params in enumerate(sample(spec.parameters, given.trials, given.seed)):
            task = _shortened(build(**params), given.epochs)
            with opened(spec, HydraExecutor) as pool:
                forecast = pool.plan([task])
            make = partial(_open, spec)
            counted = trained(make, task, forecast.trials[0].units_per_step)
            missed += _show(f"{file.parent.name}/{file.stem} {number}", params, forecast, counted, kinds=given.kinds)
    return 1 if missed else 0


def _open(spec: Any, **options: Any) -> Any:
    return opened(spec, partial(HydraExecutor, **options))


if __name__ == "__main__":
    sys.exit(main())
