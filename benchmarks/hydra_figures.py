"""HYDRA's Figures 7 to 10 and Table 3, in simulation.

    python benchmarks/hydra_figures.py                       # minutes, on one core
    python benchmarks/hydra_figures.py --quick               # seconds: few points, few steps
    python benchmarks/hydra_figures.py --images docs/images --json figures.json

The pool's own scheduler, on the virtual clock of `hydra_tune.simulate`, with the cost model of `hydra_cost.py`, which says
where each of its numbers comes from. The other kinds of parallelism are `baselines.py`. Everything is
normalised to model parallelism, as in the paper. Where the paper's text has a figure, it is printed beside ours. Nothing
is fitted to it. Only a share of each trial's steps is simulated (`--share`); the tables repeat exactly.

Settings that the paper's text leaves open, and what is taken here:

* Figure 7, GPipe's microbatches: 8, one sample of the smallest batch; and as many as the batch has samples, up to 32.
* Figure 8: 250M to 2B parameters, batches of 16.
* Figures 9 and 10: batches of 32. Table 3: models of the same 250M parameters, batches of 8, 16 and 32.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra_plots
from hydra_cost import Machine, bert_workload, shortened, vit_workload
from hydra_runs import (
    QUICK,
    Points,
    as_json,
    figure_7,
    figure_8,
    figure_9,
    figure_10,
    hydra,
    most_sharp_can_do,
    sensitivity,
    table_3,
)
from rich.console import Console
from rich.table import Table

from hydra_tune.simulate.plot import plot_timeline

WORKLOADS = {"BERT": bert_workload(), "ViT": vit_workload()}
TABLE_3_PAPER = (1.0, 2.3, 13.05, 2.3, 13.05)
FIGURE_7_PAPER = {
    "model parallelism": ("1", ""),
    "pipeline, 8 microbatches": ("about 5", ""),
    "HYDRA, recompute, lrtf": ("about 7.5", "over 80%"),
}


def everything(points: Points, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {"points": as_json(points)}
    parts = {
        "figure 7": lambda: {name: figure_7(models, points) for name, models in WORKLOADS.items()},
        "most that SHARP can do": lambda: {name: most_sharp_can_do(models) for name, models in WORKLOADS.items()},
        "figure 8": lambda: figure_8(points),
        "figure 9": lambda: figure_9(points),
        "figure 10": lambda: figure_10(points),
        "table 3": lambda: table_3(points),
        "sensitivity": lambda: sensitivity(WORKLOADS["BERT"], points),
    }
    for name, play in parts.items():
        with console.status(name):
            found[name] = play()
    return found


def print_all(found: Mapping[str, Any], console: Console) -> None:
    _print_figure_7(found, console)
    times = found["figure 8"]["times"]
    sizes = [f"{size / 1e9:g}B" for size in found["figure 8"]["sizes"]]
    ratios = {f"{name}: speed-up": row for name, row in _speedups(times).items()}
    console.print(
        _table("Figure 8: 12 models on 8 devices, time; paper: speed-ups fairly consistent", sizes, times | ratios)
    )
    for number, places, title in (
        (9, "devices", "4 models, speed-up; paper: about linear to 4, then flat"),
        (10, "models", "on 8 devices, speed-up; paper: about the number of models, to close to 8"),
    ):
        data = dict(found[f"figure {number}"])
        labels = [f"{place}" for place in data.pop(places)]
        console.print(_table(f"Figure {number}: {places}, {title}", labels, data))
    rows: dict[str, Sequence[float]] = {"paper": TABLE_3_PAPER}
    rows |= {name: list(row.values()) for name, row in found["table 3"].items()}
    columns = list(next(iter(found["table 3"].values())))
    console.print(_table("Table 3: 16 models on 8 devices, time over HYDRA's", columns, rows))
    columns = list(next(iter(found["sensitivity"].values())))
    rows = {name: list(row.values()) for name, row in found["sensitivity"].items()}
    console.print(_table("BERT workload of Figure 7, with other assumptions", columns, rows))


def _print_figure_7(found: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Figure 7: 12 models on 8 devices, speed-up over model parallelism, and utilisation")
    table.add_column("kind of parallelism")
    for workload in WORKLOADS:
        for what in ("speed-up", "utilisation"):
            table.add_column(f"{workload}, {what}", justify="right")
    table.add_column("paper, speed-up", justify="right")
    table.add_column("paper, utilisation", justify="right")
    for name in found["figure 7"]["BERT"]:
        rows = [found["figure 7"][workload][name] for workload in WORKLOADS]
        cells = [cell for row in rows for cell in (f"{row['speedup']:.2f}", f"{row['utilisation']:.1%}")]
        table.add_row(name, *cells, *FIGURE_7_PAPER.get(name, ("", "")))
    bounds = found["most that SHARP can do"].values()
    table.add_row("most that SHARP can do", *[cell for bound in bounds for cell in (f"{bound:.2f}", "")], "", "")
    console.print(table)


def _table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float]]) -> Table:
    table = Table(title=title)
    table.add_column()
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *[f"{value:.1%}" if "utilisation" in f"{name}{column}" else f"{value:.2f}"
                              for column, value in zip(columns, values, strict=True)])  # fmt: skip
    return table


def _speedups(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    base = times["model parallelism"]
    return {name: [one / own for one, own in zip(base, row, strict=True)] for name, row in times.items()}


def draw_all(found: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    speedups = {
        f"{workload}: 12 models, 8 devices": {name: run["speedup"] for name, run in runs.items()}
        for workload, runs in found["figure 7"].items()
    }
    hydra_plots.bars(
        folder / "figure-7.png",
        speedups,
        x_label="speed-up over model parallelism",
        note={"paper: pipeline": 5, "paper: HYDRA": 7.5},
    )
    eight = found["figure 8"]
    sizes = [size / 1e9 for size in eight["sizes"]]
    hydra_plots.lines(
        folder / "figure-8.png",
        {
            "time, first model parallelism = 1": (sizes, eight["times"]),
            "speed-up over model parallelism": (sizes, _speedups(eight["times"])),
        },
        x_label="parameters of each of 12 models on 8 devices, billions",
    )
    for number, places, title in ((9, "devices", "4 models"), (10, "models", "8 devices")):
        data = dict(found[f"figure {number}"])
        where = data.pop(places)
        series = {name: values for name, values in data.items() if not name.startswith("utilisation")}
        hydra_plots.lines(
            folder / f"figure-{number}.png",
            {f"{title}, speed-up over model parallelism": (where, series)},
            x_label=places,
        )
    few_steps = [shortened(model, 1 / 1020) for model in WORKLOADS["BERT"]]
    plot_timeline(hydra(few_steps, Machine(), keep=False, timeline=10_000), folder / "timeline.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points and few steps: the shapes, in seconds")
    parser.add_argument("--share", type=float, help=f"of each trial's steps; {Points().share:g}, quick {QUICK.share:g}")
    parser.add_argument("--json", type=Path, help="a file to write all figures to")
    parser.add_argument("--images", type=Path, help="a folder to draw the figures in")
    options = parser.parse_args()
    points = QUICK if options.quick else Points()
    if options.share is not None:
        if not 0 < options.share <= 1:
            parser.error(f"--share must be above 0 and at most 1, not {options.share:g}")
        points = replace(points, share=options.share)
    console = Console()
    found = everything(points, console)
    print_all(found, console)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    if options.images is not None:
        draw_all(found, options.images)


if __name__ == "__main__":
    main()
