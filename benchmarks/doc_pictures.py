"""Pictures of the docs: the pool's speed by the size of a model, a device's memory over a step of a cut model, the live view.

    python benchmarks/doc_pictures.py                        # all, into docs/images; within three minutes of one core
    python benchmarks/doc_pictures.py speed --quick          # two tiny models and few steps: that it works, no figures

`speed-by-size.png`: MLPs of eight equal layers, batches of 64, AdamW. A step of a plain loop, over a step of the same trial

    fits     alone on a CPU device with ample memory
    fused    as one of eight trials that are computed together (a step of all, over eight)
    cut      on a CPU device that holds 60% of a plain loop's peak, so that the model is cut and its state comes and goes

A step is from one batch to the next, the mean of all but the first quarter, so captures and traces do not count; the clock is
the wall's. The arms take turns, each in a process of its own with one intra-op thread, and a ratio is the median of the rounds'
ratios. The losses of all arms but the fused one must have the same bits. The numbers are beside the picture, as
`speed-by-size.json`.

`memory-over-a-step.png`: one step of a small GPT on a CPU device of 40% of a plain loop's peak, behind a link of 1 GB/s. The
line is the device's ledger, noted at each change; units and copies are those of the event log.

`live-view.svg`: six of these trials on two such devices after some seconds, as a terminal of 110 columns shows them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import hydra_plots  # noqa: E402 - benchmarks/ is the script's folder
import transformer  # noqa: E402
from pool import machine  # noqa: E402

from hydra_tune import HydraExecutor, TrainTask, train_plain  # noqa: E402 - needs the path above
from hydra_tune.memory.ledger import MemoryLedger  # noqa: E402
from hydra_tune.observe.event_log.reader import RunLog, read_log  # noqa: E402
from hydra_tune.observe.event_log.writer import EventLog  # noqa: E402
from hydra_tune.observe.live.screen import sweep_lines  # noqa: E402
from hydra_tune.pool.views.live_snapshot import SweepMonitor  # noqa: E402
from hydra_tune.shard.cost.pilot import StorageTracker  # noqa: E402

ARMS = ("plain", "fits", "fused", "cut")
WIDTHS = (32, 64, 128, 256, 512, 1024)
DEPTH, BATCH_SIZE, MEMBERS = 8, 64, 8
FEWEST_STEPS, MOST_STEPS, ARM_FLOPS = 8, 500, 1e10  # of an arm of one trial, forward and backward
CUT_SHARE, MARGIN = 0.6, 1 << 12  # what the ledger's rounding to 64 bytes adds to a tracked peak is less
SECONDS = 1e9
MB = 1e6
LABELS = {
    "fits": "the model fits",
    "fused": f"{MEMBERS} trials that fit, fused",
    "cut": f"the model is cut, in {CUT_SHARE:.0%} of its memory",
}
GPT_WIDTH, GPT_DEPTH, GPT_LENGTH, GPT_VOCABULARY, GPT_BATCH = 256, 6, 128, 512, 8
GPT_SHARE, GPT_LINK, GPT_STEPS = 0.4, "1GB/s", 6
COLUMNS, ROWS = 110, 20
UNIT_COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "update": "tab:green"}


class Data:
    """The same batches in every arm; notes the time whenever one is drawn."""

    def __init__(self, num_steps: int, draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [draw(generator) for _ in range(4)]
        self._num_steps = num_steps
        self._marks: list[float] = []

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass."""
        for step in range(self._num_steps):
            self._marks.append(time.perf_counter())
            yield self._batches[step % len(self._batches)]
        self._marks.append(time.perf_counter())

    def step_seconds(self) -> float:
        """The mean of the last pass but for its first quarter: short steps share a unit, and are drawn one after another."""
        marks = self._marks[-self._num_steps - 1 :]
        warm = self._num_steps // 4
        return (marks[-1] - marks[warm]) / (self._num_steps - warm)


# The pool's speed by the size of a model.


def mlp(width: int) -> nn.Module:
    """Equal layers."""
    return nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())][:-1])


def steps_of(width: int, *, is_quick: bool) -> int:
    """As many as take a plain loop half a second, roughly."""
    if is_quick:
        return FEWEST_STEPS
    return max(FEWEST_STEPS, min(MOST_STEPS, int(ARM_FLOPS / (6 * BATCH_SIZE * DEPTH * width**2))))


def mlp_task(width: int, num_steps: int, seed: int = 0) -> tuple[TrainTask, Data]:
    """One trial."""
    data = Data(
        num_steps,
        lambda generator: (
            torch.randn(BATCH_SIZE, width, generator=generator),
            torch.randint(width, (BATCH_SIZE,), generator=generator),
        ),
    )
    optimizer = partial(torch.optim.AdamW, lr=1e-3 * (1 + seed))
    return TrainTask(
        model=partial(mlp, width), optimizer=optimizer, loss=functional.cross_entropy, train=data, seed=1 + seed
    ), data


def plain_peak(task: TrainTask) -> int:
    """The most bytes of a plain loop."""
    tracker = StorageTracker(64)
    with tracker:
        train_plain(task)
    return tracker.peak_bytes


def run_arm(arm: str, width: int, *, is_quick: bool) -> dict[str, Any]:
    """One arm of one width in this process: seconds of a trial's step, and the loss."""
    num_steps = steps_of(width, is_quick=is_quick)
    made = [mlp_task(width, num_steps, seed) for seed in range(MEMBERS if arm == "fused" else 1)]
    tasks, data = [task for task, _ in made], made[0][1]
    options: dict[str, Any] = {}
    if arm == "plain":
        loss = train_plain(tasks[0]).metrics["train_loss"]
        return {"seconds": data.step_seconds(), "loss": loss.hex()}
    if arm == "fused":
        options = {"fusion": "on", "fusion_size": MEMBERS}
    if arm == "cut":
        options = {"device_memory": int(CUT_SHARE * plain_peak(mlp_task(width, 2)[0])) + MARGIN}
    with HydraExecutor(devices="cpu:1", max_concurrent=len(tasks), **options) as pool:
        results = pool.run(tasks)
    group = {result.group_size for result in results}
    if group != {len(tasks)}:
        raise SystemExit(f"width {width}, {arm}: groups of {group}")
    if (results[0].num_shards > 1) != (arm == "cut"):
        raise SystemExit(f"width {width}, {arm}: {results[0].num_shards} shards")
    return {
        "seconds": data.step_seconds() / len(tasks),
        "loss": results[0].metrics["train_loss"].hex(),
        "shards": results[0].num_shards,
    }


def start_arm(arm: str, widths: Sequence[int], *, is_quick: bool) -> list[dict[str, Any]]:
    """All widths of an arm in a fresh process."""
    command = [sys.executable, __file__, "speed", "--arm", arm, "--widths", *map(str, widths)]
    done = subprocess.run(
        [*command, *["--quick"] * is_quick],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(widths: Sequence[int], rounds: int, *, is_quick: bool) -> dict[str, Any]:
    """The speeds of all widths."""
    runs: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else reversed(ARMS):
            runs[arm].append(start_arm(arm, widths, is_quick=is_quick))
    rows = []
    for place, width in enumerate(widths):
        of = {arm: [found[place] for found in runs[arm]] for arm in ARMS}
        if len({run["loss"] for arm in ("plain", "fits", "cut") for run in of[arm]}) != 1:
            raise SystemExit(f"width {width}: the arms disagree on the loss")
        speeds = {
            arm: statistics.median(a["seconds"] / b["seconds"] for a, b in zip(of["plain"], of[arm], strict=True))
            for arm in ARMS[1:]
        }
        rows.append(
            {
                "width": width,
                "parameters": sum(parameter.numel() for parameter in mlp(width).parameters()),
                "steps": steps_of(width, is_quick=is_quick),
                "plain_ms": 1e3 * statistics.median(run["seconds"] for run in of["plain"]),
                **speeds,
                "shards_cut": of["cut"][0]["shards"],
            }
        )
    return {
        "machine": machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "load": round(os.getloadavg()[0], 1),
        "command": "python benchmarks/doc_pictures.py speed",
        "rounds": rounds,
        "model": f"MLP of {DEPTH} layers, batches of {BATCH_SIZE}, AdamW, float32",
        "rows": rows,
    }


def print_speeds(found: dict[str, Any]) -> None:
    """A line per width."""
    print(f"{found['machine']}; {found['date']}; {found['rounds']} rounds; load {found['load']}")
    print(f"{'width':>6}{'parameters':>12}{'plain ms':>10}{'fits':>7}{'fused':>7}{'cut':>7}{'shards':>8}")
    for row in found["rows"]:
        speeds = "".join(f"{row[arm]:>7.2f}" for arm in ARMS[1:])
        print(f"{row['width']:>6}{row['parameters']:>12,}{row['plain_ms']:>10.2f}{speeds}{row['shards_cut']:>8}")


def draw_speeds(found: dict[str, Any], path: Path) -> None:
    """A line per arm."""
    figure, (axes,) = hydra_plots.figure(1)
    places = [row["parameters"] for row in found["rows"]]
    for number, arm in enumerate(ARMS[1:]):
        axes.plot(
            places,
            [row[arm] for row in found["rows"]],
            label=LABELS[arm],
            marker=hydra_plots.MARKERS[number],
            linewidth=1.4,
        )
    axes.axhline(1, linestyle="--", color="0.5", linewidth=1)
    axes.annotate("a plain loop", (0.99, 1), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("speed over a plain loop's")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{found['model']}\n{found['machine']}; {found['date']}", fontsize=7)
    figure.savefig(path, format="png", dpi=100)


# A device's memory over a step.


def gpt_task(num_steps: int, *, is_quick: bool) -> TrainTask:
    """One trial."""
    shrink = 4 if is_quick else 1
    width, length = GPT_WIDTH // shrink, GPT_LENGTH // shrink
    data = Data(
        num_steps,
        lambda generator: torch.randint(GPT_VOCABULARY, (2, GPT_BATCH, length), generator=generator).unbind(),
    )
    return TrainTask(
        model=partial(transformer.Transformer, GPT_VOCABULARY, width, 4, GPT_DEPTH, length),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=transformer.loss,
        train=data,
        seed=1,
    )


class Watch:
    """Notes what a device's ledger has taken, at each change, and the start of the first unit in the log, by one clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.marks: list[tuple[int, int]] = []
        self.first_unit_ns: int | None = None

    def __enter__(self) -> Self:
        self._methods = MemoryLedger.try_take, MemoryLedger.give_back, EventLog.unit
        take, give, write_unit = self._methods

        def try_take(ledger: MemoryLedger, nbytes: int, *, to_the_last: bool = False) -> bool:
            is_taken = take(ledger, nbytes, to_the_last=to_the_last)
            self._note(ledger)
            return is_taken

        def give_back(ledger: MemoryLedger, nbytes: int) -> None:
            give(ledger, nbytes)
            self._note(ledger)

        def unit(
            log: EventLog, device: str, job: str, kind: str, shard: int, start_ns: int, *rest: Any, **more: Any
        ) -> None:
            self.first_unit_ns = start_ns if self.first_unit_ns is None else self.first_unit_ns
            write_unit(log, device, job, kind, shard, start_ns, *rest, **more)

        MemoryLedger.try_take, MemoryLedger.give_back, EventLog.unit = try_take, give_back, unit
        return self

    def __exit__(self, *_exception: object) -> None:
        MemoryLedger.try_take, MemoryLedger.give_back, EventLog.unit = self._methods

    def _note(self, ledger: MemoryLedger) -> None:
        if ledger.name == self.name:
            self.marks.append((time.perf_counter_ns(), ledger.used_bytes))


def watched_run(*, is_quick: bool) -> dict[str, Any]:
    """Train a few steps; the log of the run, the ledger's marks by the log's clock, and the sizes."""
    peak_bytes = plain_peak(gpt_task(2, is_quick=is_quick))
    budget_bytes = int(GPT_SHARE * peak_bytes)
    with TemporaryDirectory() as folder, Watch("cpu:0") as watch:
        path = Path(folder) / "run.jsonl"
        with HydraExecutor(
            devices="cpu:1", device_memory=budget_bytes, link_bandwidth=GPT_LINK, event_log=path
        ) as pool:
            (result,) = pool.run([gpt_task(GPT_STEPS, is_quick=is_quick)])
        log = read_log(path)
    began_ns = watch.first_unit_ns - log.units[0].start_ns  # the log's clock begins at the first submission
    marks = sorted((at_ns - began_ns, used) for at_ns, used in watch.marks)
    return {
        "log": log,
        "marks": marks,
        "peak": peak_bytes,
        "budget": budget_bytes,
        "shards": result.num_shards,
    }


def step_span(log: RunLog) -> tuple[int, int]:
    """The last step but one, from its first forward unit to the next step's."""
    first = [unit.start_ns for unit in log.units if (unit.kind, unit.shard) == ("forward", 0)]
    return first[-2], first[-1]


def draw_memory(found: dict[str, Any], path: Path) -> None:
    """The ledger above, units and copies below."""
    log, (start, end) = found["log"], step_span(found["log"])
    figure, (axes,) = hydra_plots.figure(1)
    figure.set_size_inches(9, 4.6)
    before = [mark for mark in found["marks"] if mark[0] < start][-1:]
    shown = [(start, before[0][1] if before else 0), *[mark for mark in found["marks"] if start <= mark[0] <= end]]
    shown.append((end, shown[-1][1]))
    times = [(at - start) / SECONDS * 1e3 for at, _ in shown]
    axes.fill_between(times, [used / MB for _, used in shown], step="post", alpha=0.35, linewidth=0)
    axes.step(times, [used / MB for _, used in shown], where="post", linewidth=1.2)
    for value, name in ((found["budget"], "the device's memory"), (found["peak"], "most that a plain loop needs")):
        axes.axhline(value / MB, linestyle="--", linewidth=1, color="0.4")
        axes.annotate(name, (0, value / MB), fontsize=8, va="bottom")
    top = found["peak"] / MB
    lanes = {"units": -0.10 * top, "loads": -0.17 * top, "spills": -0.24 * top}
    for unit in (unit for unit in log.units if start <= unit.start_ns < end):
        _bar(axes, (unit.ready_ns, unit.end_ns), start, lanes["units"], 0.06 * top, UNIT_COLOURS.get(unit.kind, "0.5"))
        middle = ((unit.ready_ns + unit.end_ns) / 2 - start) / SECONDS * 1e3
        if unit.end_ns - unit.ready_ns > 0.02 * (end - start):
            label = f"{unit.kind[:1].upper()}{unit.shard}"
            axes.annotate(label, (middle, lanes["units"]), fontsize=7, ha="center", va="center", color="white")
    for copy in (copy for copy in log.copies if copy.end_ns > start and copy.start_ns < end):
        lane = lanes["spills" if copy.what == "out" else "loads"]
        _bar(axes, (max(copy.start_ns, start), min(copy.end_ns, end)), start, lane, 0.045 * top, "0.35")
    for name, place in lanes.items():
        axes.annotate(name, (-0.005, place), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="center")
    axes.set_ylim(-0.3 * top, 1.1 * top)
    axes.set_xlim(0, (end - start) / SECONDS * 1e3)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.1 * top])
    axes.set_ylabel("MB on the device")
    axes.set_xlabel("milliseconds of a step")
    axes.set_title(
        f"A GPT of {GPT_DEPTH} layers in {found['shards']} shards, {GPT_SHARE:.0%} of a plain loop's memory, link {GPT_LINK}\n"
        f"{machine()}; {datetime.now(UTC):%Y-%m-%d}",
        fontsize=8,
    )
    figure.savefig(path, format="png", dpi=100)


def _bar(axes: Any, span: tuple[int, int], start: int, lane: float, height: float, colour: str) -> None:
    left, right = ((at - start) / SECONDS * 1e3 for at in span)
    axes.barh(lane, right - left, left=left, height=height, color=colour, linewidth=0)


def check(found: dict[str, Any]) -> None:
    """The ledger never exceeds the budget, and the model has been cut."""
    most = max(used for _, used in found["marks"])
    gaps = [after[0] - before[0] for before, after in pairwise(found["marks"])]
    if found["shards"] < 2 or most > found["budget"]:
        raise SystemExit(f"{found['shards']} shards, {most} bytes of {found['budget']}")
    print(
        f"{found['shards']} shards; peak {most / MB:.1f} of {found['budget'] / MB:.1f} MB, a plain loop's "
        f"{found['peak'] / MB:.1f} MB; {len(gaps)} changes of the ledger"
    )


# The live view.


def draw_live(path: Path, *, is_quick: bool) -> None:
    """Show six trials in mid-run as a terminal would."""
    task = gpt_task(4 if is_quick else 60, is_quick=is_quick)
    monitor = SweepMonitor("gpt", "minimize", lambda _trial, _metric: None)
    budget_bytes = int(GPT_SHARE * plain_peak(gpt_task(2, is_quick=is_quick)))
    with HydraExecutor(devices="cpu:2", device_memory=budget_bytes, link_bandwidth=GPT_LINK, max_concurrent=4) as pool:
        jobs = [pool.submit(replace(task, epochs=4), f"gpt-{number}") for number in range(6)]
        monitor.add(jobs)
        while not any(job.progress.epoch for job in jobs) and not is_quick:
            time.sleep(0.1)
            monitor.snapshot(pool.stats())  # rates come from two looks
        lines = sweep_lines(monitor.snapshot(pool.stats()), (), COLUMNS, ROWS)
        for job in jobs:
            job.cancel()
    console = Console(width=COLUMNS, record=True, file=StringIO())
    for line in lines:
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in line)), soft_wrap=True)
    path.write_text(console.export_svg(title="hydra-tune sweep"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=[[], "speed", "memory", "live"], help="all, if none is named")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="the folder to draw in")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and few steps, of which the figures mean nothing"
    )
    parser.add_argument("--arm", choices=ARMS, help="run only this one, in this process, and print it as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.arm:
        print(json.dumps([run_arm(options.arm, width, is_quick=options.quick) for width in options.widths]))
        return
    if "speed" in (options.pictures or ["speed"]):
        widths = options.widths[:2] if options.quick else options.widths
        found = measured(widths, 1 if options.quick else options.rounds, is_quick=options.quick)
        print_speeds(found)
        (options.images / "speed-by-size.json").write_text(json.dumps(found, indent=1) + "\n")
        draw_speeds(found, options.images / "speed-by-size.png")
    if "memory" in (options.pictures or ["memory"]):
        found = watched_run(is_quick=options.quick)
        check(found)
        draw_memory(found, options.images / "memory-over-a-step.png")
    if "live" in (options.pictures or ["live"]):
        draw_live(options.images / "live-view.svg", is_quick=options.quick)


if __name__ == "__main__":
    main()
