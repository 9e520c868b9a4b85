"""What training costs when host memory holds half of a trial's state: against all of it on the host, and against the disk.

    python benchmarks/disk.py [FOLDER]

Prints seconds of a step with the state on the host and with half of it on disk, the disk's own seconds for the same bytes
(files of one layer, same pieces, nothing else running), and the ratio of the slower of the two to what was reached. Each is
the best of some runs; a disk whose speed changes from run to run, as virtual ones do, makes the ratio no better than that.
"""

import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.memory.disk import Disk
from hydra_tune.memory.spill_dir import SpillFolder
from hydra_tune.pool.stats import DiskStats

WIDTH, LAYERS = 1024, 12
STEPS = (2, 8)  # the difference leaves out what comes once
RUNS = 2
STATE_BYTES = 3 * LAYERS * (WIDTH + 1) * WIDTH * 4
DEVICE_BYTES = 10 * WIDTH * WIDTH * 4 + 2**24


def _model() -> nn.Module:
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers[:-2])


def _task(rows: int, steps: int) -> TrainTask:
    x = torch.randn(rows, WIDTH)
    return TrainTask(
        model=_model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=nn.MSELoss(),
        train=lambda: [(x, x)] * steps,
        epochs=1,
    )


def _run(rows: int, steps: int, folder: Path | None) -> tuple[float, DiskStats | None]:
    """Seconds in units, and the disk's figures."""
    host = STATE_BYTES // 2 if folder else 2**33
    with HydraExecutor(
        devices="cpu:1", device_memory=DEVICE_BYTES, host_memory=host, spill_dir=folder, num_shards="layer"
    ) as pool:
        (result,) = pool.run([_task(rows, steps)])
        if result.error is not None:
            raise result.error
        stats = pool.stats()
    return stats.devices["cpu:0"].busy_seconds, stats.disk


def _step(rows: int, folder: Path | None) -> tuple[float, float, float]:
    """Seconds, bytes read and bytes written of one step."""
    found = []
    for _ in range(RUNS):
        (less, few), (more, many) = (_run(rows, steps, folder) for steps in STEPS)
        count = STEPS[1] - STEPS[0]
        read = written = 0.0
        if few is not None and many is not None:
            read = (many.bytes_read - few.bytes_read) / count
            written = (many.bytes_written - few.bytes_written) / count
        found.append(((more - less) / count, read, written))
    return min(found)


def _bandwidths(folder: Path) -> tuple[float, float, bool]:
    """Bytes a second read and written, in files of the size of a layer's parameters."""
    disk = Disk(SpillFolder(folder))
    data, numbers = torch.ones(WIDTH * WIDTH * 4, dtype=torch.uint8), range(1, 25)
    try:
        best = [0.0, 0.0]
        for _ in range(RUNS):
            marks = [time.perf_counter()]
            for transfer in (disk.write, disk.read):
                for number in numbers:
                    transfer(number, data)
                marks.append(time.perf_counter())
            seconds = [b - a for a, b in pairwise(marks)]
            best = [max(old, len(numbers) * data.numel() / new) for old, new in zip(best, seconds, strict=True)]
        return best[1], best[0], disk.is_direct
    finally:
        disk.close()


def main(parent: str | None = None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        reads, writes, is_direct = _bandwidths(folder)
        print(
            f"disk: {reads / 1e6:.0f} MB/s read, {writes / 1e6:.0f} MB/s written, {'O_DIRECT' if is_direct else 'buffered'}; "
            f"state {STATE_BYTES / 1e6:.0f} MB, of which the host holds half"
        )
        print("rows | step, state on host | step, half on disk | read MB | written MB | disk alone | slower / reached")
        for rows in (64, 512):
            memory, _, _ = _step(rows, None)
            seconds, read, written = _step(rows, folder)
            alone = read / reads + written / writes
            print(
                f"{rows:4} | {memory:.3f} s | {seconds:.3f} s | {read / 1e6:.0f} | {written / 1e6:.0f} | {alone:.3f} s | "
                f"{max(memory, alone) / seconds:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
