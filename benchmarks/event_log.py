"""What the event log and the live view cost: CPU time of whole runs with and without them, and of their own threads.

    python benchmarks/event_log.py                    # five rounds
    python benchmarks/event_log.py --rounds 3
    python benchmarks/event_log.py --switch 110       # one run of the tiny ones, in which the log goes on and off
    python benchmarks/event_log.py --view             # with the log and the live view, or neither; also with --switch
    python benchmarks/event_log.py --run run.jsonl    # one spilled run behind slow links, for hydra-tune trace

Two workloads on two CPU devices, each in a process of its own with one intra-op thread, with and without a log in turns:

    spilled    transformers whose shards come and go, units of some 20 ms
    tiny       MLPs that come and go likewise, units of about a millisecond: as many events in a second as there can be

The CPU time of a run is that of its process, all threads, from the first submission to the last result. It differs by some per
cent from run to run, more than the log takes, so its parts are measured as well: the log's thread says what it has used, and
telling it of a unit or a copy is timed in a loop and multiplied by how many there were. With --switch one run is cut into
windows of 0.6 s, with the log and without in turns, whose CPU time for a unit is compared: far less noise.

With --view whatever has a log also has a live view of 160 columns and 50 lines, whose bytes go to /dev/null: its thread says
what it has used; what it asks of the pool, under the pool's lock, it asks on that thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import transformer  # noqa: E402 - benchmarks/ is the script's folder
from rich.console import Console  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402
from hydra_tune.observe.event_log.reader import read_log  # noqa: E402
from hydra_tune.observe.event_log.writer import EventLog  # noqa: E402
from hydra_tune.observe.live.terminal import LiveView  # noqa: E402
from hydra_tune.pool.job import Job  # noqa: E402
from hydra_tune.pool.views.live_snapshot import SweepMonitor  # noqa: E402

NUM_TRIALS = 4
NUM_TIMED, NUM_BURSTS = 10_000, 8  # events in the loop, between which they are written


def mlp() -> nn.Module:
    sizes = [64, *[192] * 6, 10]
    layers = [layer for one, other in pairwise(sizes) for layer in (nn.Linear(one, other), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def tiny(seed: int, num_steps: int) -> TrainTask:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(256, 64, generator=generator), torch.randint(10, (256,), generator=generator)
    return TrainTask(
        model=mlp,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        train=lambda: ((x, y) for _ in range(num_steps)),
        loss=functional.cross_entropy,
        epochs=1,
        seed=seed,
    )


WORKLOADS = {
    "spilled": (transformer.build, 20, {"device_memory": "18MiB"}),
    "tiny": (tiny, 150, {"device_memory": "2560KiB", "num_shards": 4}),
}


class View:
    """A live view that nobody sees.

    Args:
        pool: what it shows.

    Attributes:
        is_on: whether it draws; jobs are watched all the time.
    """

    def __init__(self, pool: HydraExecutor) -> None:
        self.is_on = True
        self._pool = pool
        self._watch = SweepMonitor("benchmark", "minimize", lambda _trial, _metric: None)
        self._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed in `close`
        console = Console(file=self._file, force_terminal=True, color_system="256", width=160, height=50)
        self._shown = LiveView(console, lambda: self._watch.snapshot(pool.stats()), deque())
        draw = self._shown._ticker._function  # noqa: SLF001 - nothing public holds a view back
        self._shown._ticker._function = lambda: draw() if self.is_on else None  # noqa: SLF001
        self._shown.__enter__()

    def add(self, jobs: list[Job]) -> None:
        """Show these too."""
        self._watch.add(jobs)

    def close(self) -> float:
        """End it; returns the CPU seconds of its thread."""
        self._shown.__exit__(None, None, None)
        self._file.close()
        return self._shown._ticker.cpu_seconds  # noqa: SLF001 - as above


def run(workload: str, log: str | None, *, with_view: bool = False, **options: str) -> dict[str, float]:
    """One run in this process; the process was started for it."""
    torch.set_num_threads(1)
    build, num_steps, more = WORKLOADS[workload]
    tasks = [build(seed, num_steps) for seed in range(NUM_TRIALS)]
    with HydraExecutor(devices="cpu:2", max_concurrent=NUM_TRIALS, event_log=log, **more, **options) as pool:
        view = View(pool) if with_view else None
        started, cpu_started = time.perf_counter(), time.process_time()
        jobs = [pool.submit(task) for task in tasks]
        if view is not None:
            view.add(jobs)
        results = [job.result() for job in jobs]
        view_seconds = 0.0 if view is None else view.close()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    for result in results:
        if result.error is not None:
            raise result.error
    stats = pool.stats()
    busy = sum(device.busy_seconds for device in stats.devices.values())
    figures = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "units": stats.units_run,
        "unit_seconds": busy / stats.units_run,
        "loss": results[0].history[-1]["train_loss"],
    }
    if log is not None:
        found = read_log(Path(log))
        num_told = len(found.units) + len(found.copies) + len(found.waits)
        figures |= {
            "view_share": view_seconds / cpu_seconds,
            "thread_share": found.cpu_seconds / cpu_seconds,
            "telling_share": telling_seconds() * num_told / cpu_seconds,
            "events_per_unit": num_told / stats.units_run,
            "bytes_per_unit": Path(log).stat().st_size / stats.units_run,
        }
    return figures


def telling_seconds() -> float:
    """CPU seconds that it takes to tell a log of a copy, the longest of the events, garbage collection included."""
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "run.jsonl", [("cpu:0", 1)], {})
        log.job("0:job", "submitted")
        for _ in range(NUM_BURSTS):
            started = time.thread_time()
            for number in range(NUM_TIMED):
                log.copied("cpu:0", "in", number, "parameters", 3, 4096, "background", number, number)
            seconds += time.thread_time() - started
            time.sleep(0.7)  # it is written twice a second
        log.close()
    return seconds / (NUM_TIMED * NUM_BURSTS)


def run_apart(workload: str, log: str | None, *, with_view: bool) -> dict[str, float]:
    arguments = [sys.executable, __file__, "--arm", workload, *(["--run", log] if log else [])]
    arguments += ["--view"] if with_view else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def compare(workload: str, rounds: int, *, with_view: bool) -> None:
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for is_logged in (number % 2 == 0, number % 2 == 1):
                log = f"{folder}/{number}.jsonl" if is_logged else None
                found[is_logged].append(run_apart(workload, log, with_view=with_view and is_logged))
    if len({one["loss"] for some in found.values() for one in some}) > 1:
        sys.exit(f"{workload}: losses differ")
    with_log, without = ([one["cpu_seconds"] for one in found[is_logged]] for is_logged in (True, False))
    middle = {key: statistics.median(one[key] for one in found[True]) for key in found[True][0]}
    print(
        f"{workload}: {middle['units']:.0f} units of {1e3 * middle['unit_seconds']:.1f} ms, {middle['events_per_unit']:.1f} "
        f"events and {middle['bytes_per_unit']:.0f} bytes of log for each"
    )
    for name, some in (("with a log and view" if with_view else "with a log", with_log), ("without", without)):
        print(f"  {name:<19} {statistics.median(some):.3f} CPU seconds ({min(some):.3f} to {max(some):.3f})")
    print(f"  ratio               {statistics.median(with_log) / statistics.median(without):.4f}")
    print(
        f"  of the run's CPU time: its thread {middle['thread_share']:.3%}, telling it {middle['telling_share']:.3%}, "
        f"the view's thread {middle['view_share']:.3%}, "
        f"together {middle['thread_share'] + middle['telling_share'] + middle['view_share']:.3%}",
        flush=True,
    )


def switch(seconds: float, *, with_view: bool) -> None:
    """One run in which the log, and the view, go on and off: CPU time of the process for a unit, with them and without."""
    torch.set_num_threads(1)
    build, _, more = WORKLOADS["tiny"]
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        HydraExecutor(devices="cpu:2", max_concurrent=NUM_TRIALS, event_log=f"{folder}/run.jsonl", **more) as executor,
    ):
        jobs = [executor.submit(build(seed, 1_000_000)) for seed in range(NUM_TRIALS)]
        view = View(executor) if with_view else None
        if view is not None:
            view.add(jobs)
        while any(job.state != "running" for job in jobs):
            time.sleep(0.1)
        pool = executor._pool  # noqa: SLF001 - nothing public switches the log of a running pool
        core, log = pool._core, pool._log  # noqa: SLF001
        pagers = [worker._pager for worker in pool._workers.values()]  # noqa: SLF001
        end, is_on = time.perf_counter() + seconds, True
        while time.perf_counter() < end:
            for told in (core, *pagers):
                told.log = log if is_on else None
            if view is not None:
                view.is_on = is_on
            time.sleep(0.05)
            cpu, units = time.process_time(), executor.stats().units_run
            time.sleep(0.6)
            units = executor.stats().units_run - units
            found[is_on].append((time.process_time() - cpu, units))
            is_on = not is_on
        if view is not None:
            view.close()
        for job in jobs:
            job.cancel()
    with_log, without = ([cpu / units for cpu, units in found[is_on]] for is_on in (True, False))
    pooled = [sum(cpu for cpu, _ in some) / sum(units for _, units in some) for some in (found[True], found[False])]
    told = "a log and a view" if with_view else "a log"
    print(
        f"{len(with_log)} windows with {told}, {len(without)} without: {1e3 * statistics.median(with_log):.4f} and "
        f"{1e3 * statistics.median(without):.4f} ms of CPU time for a unit, ratio "
        f"{statistics.median(with_log) / statistics.median(without):.4f}; of all windows together {pooled[0] / pooled[1]:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--switch", type=float, metavar="SECONDS", help="one run in which the log goes on and off")
    parser.add_argument("--only", choices=WORKLOADS, help="one of the two workloads")
    parser.add_argument("--view", action="store_true", help="have a live view wherever there is a log")
    parser.add_argument("--run", metavar="FILE", help="make one spilled run behind slow links, with this log")
    parser.add_argument("--arm", choices=WORKLOADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run(arguments.arm, arguments.run, with_view=arguments.view)))
    elif arguments.switch:
        switch(arguments.switch, with_view=arguments.view)
    elif arguments.run:
        print(run("spilled", arguments.run, link_bandwidth="150MB/s"))
    else:
        for workload in [arguments.only] if arguments.only else WORKLOADS:
            compare(workload, arguments.rounds, with_view=arguments.view)


if __name__ == "__main__":
    main()
