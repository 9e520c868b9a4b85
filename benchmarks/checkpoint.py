"""What checkpoints cost: a model of 50 million parameters with AdamW, saved at every second report.

    python benchmarks/checkpoint.py                        # 6 reports, of 8 steps each
    python benchmarks/checkpoint.py --reports 10 --steps 16 --folder /data

One trial on one CPU device. It is saved at every second report, so that both are measured in one run: CPU time of the process
and wall time for each report's steps. A difference of some per cent is noise on a busy machine, so the parts are measured as
well: CPU and wall time that the trial's thread spends saving (the trial waits), and the writing thread's. The cost is what
one checkpoint takes of a report's 30 seconds, of one core.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from hydra_tune import HydraExecutor, TrainTask  # noqa: E402
from hydra_tune.pool.checkpointing.writer import TrialCheckpointer  # noqa: E402

REPORT_SECONDS = 30.0
WIDTH, DEPTH = 2048, 12  # 12 x 2048 x 2048 weights


def model() -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def task(reports: int, steps: int) -> TrainTask:
    x, y = torch.randn(16, WIDTH), torch.randint(10, (16,))
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-5),
        train=lambda: ((x, y) for _ in range(reports * steps)),
        loss=functional.cross_entropy,
        report_every=steps,
    )


class Meter:
    """Adds up CPU and wall seconds of a method of `TrialCheckpointer`, and lets every second report go unsaved."""

    def __init__(self) -> None:
        self.saves = False
        self.seconds: dict[str, list[tuple[float, float]]] = {"_save": [], "_write": []}

    def install(self) -> None:
        """Time the methods from now on."""
        for name in self.seconds:
            setattr(TrialCheckpointer, name, self._timed(name, getattr(TrialCheckpointer, name)))
        due = TrialCheckpointer._is_due  # noqa: SLF001 - the only switch there is
        TrialCheckpointer._is_due = lambda keeper, *args, **more: self.saves and due(keeper, *args, **more)  # noqa: SLF001

    def _timed(self, name, method):
        def timed(*args):
            cpu, wall = time.thread_time(), time.perf_counter()
            method(*args)
            self.seconds[name].append((time.thread_time() - cpu, time.perf_counter() - wall))

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter()
    meter.install()
    between: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        HydraExecutor(devices="cpu:1", checkpoint_dir=folder) as pool,
    ):
        events = pool.events()
        job = pool.submit(task(options.reports, options.steps), "trial", events)
        was_saved, last = False, (0.0, 0.0)
        for number in range(options.reports):
            meter.saves = number % 2 == 0  # the report that comes now; it is written beside the steps after it
            assert events.get() is not None
            cpu, wall = time.process_time(), time.perf_counter()
            if number:
                between[was_saved].append((cpu - last[0], wall - last[1]))
            was_saved, last = meter.saves, (cpu, wall)
            job.proceed()
        result = job.result()
        if result.error is not None:
            raise result.error
        nbytes = max(path.stat().st_size for path in Path(folder).glob("*/*.safetensors"))
    save, write = (
        [statistics.median(values) for values in zip(*meter.seconds[name], strict=True)] for name in ("_save", "_write")
    )
    figures = {
        "parameters": sum(p.numel() for p in result.module().parameters()),
        "bytes": nbytes,
        "checkpoints": len(meter.seconds["_write"]),
        "trial_waits_seconds": save[1],
        "trial_cpu_seconds": save[0],
        "writer_cpu_seconds": write[0],
        "writer_wall_seconds": write[1],
        "cpu_share_of_30s": (save[0] + write[0]) / REPORT_SECONDS,
        "wait_share_of_30s": save[1] / REPORT_SECONDS,
        "cpu_seconds_between_reports": {str(k): statistics.median(v[0] for v in found) for k, found in between.items()},
        "wall_seconds_between_reports": {
            str(k): statistics.median(v[1] for v in found) for k, found in between.items()
        },
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
