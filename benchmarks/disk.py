"""What training costs when host memory holds half of a trial's state: against all of it on the host, and against the disk.

    python benchmarks/disk.py [FOLDER] [--rows 64 --rows 256] [--link 1GB/s]
    python benchmarks/disk.py --rows 1 --light     # little to compute for what the disk moves
    python benchmarks/disk.py --rows 1 --frozen    # next to nothing: only the last layer is trained, the others are read alone

A step of one trial with its state on the host, the same with half of it on disk (more: `--host 25`), first with nothing sent
ahead, so that units wait for copies between host and device (the disk's thread reads ahead all the same), and what the disk
alone takes for the bytes that this moved: files of one layer, read and written in turn in the same pieces, past the page cache,
with nothing else running, right before and right after. "reached" is the slower of computing and of the disk alone, divided by
the step: 1 would be all of one behind the other. The kernel's own count of what the process has read from the device is beside
ours, so that the page cache cannot have helped. CPU seconds are of all threads: the disk's thread needs a core of its own, or
part of one.
Steps are medians, for a disk whose speed changes, as virtual ones do; times are worth little on a machine that does other work.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.spill_dir import SpillFolder

WIDTH, LAYERS = 1024, 12
WARM_UP = 4  # when blocks are needed is known after two steps
LAYER_BYTES = (WIDTH + 1) * WIDTH * 4
DEVICE_BYTES = {
    "adamw": 10 * WIDTH * WIDTH * 4 + 2**24,
    "light": 6 * WIDTH * WIDTH * 4,
    "frozen": 5 * WIDTH * WIDTH * 4,
}
COPIES = {"adamw": 3, "light": 2, "frozen": 1}  # of a layer's parameters: those, and what the optimizer keeps
ROWS = (64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained: samples of a batch, steps that count, how, and the part of its state that the host holds."""

    rows: int
    steps: int
    kind: str
    host: float

    @property
    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Makes the optimizer."""
        if self.kind == "adamw":
            return partial(torch.optim.AdamW, lr=1e-3)
        return partial(torch.optim.SGD, lr=1e-3, momentum=0.9 if self.kind == "light" else 0.0)

    @property
    def state_bytes(self) -> int:
        """Parameters and what the optimizer keeps of each."""
        return COPIES[self.kind] * LAYERS * LAYER_BYTES

    @property
    def device_bytes(self) -> int:
        """Memory of the device."""
        return DEVICE_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class Mark:
    """What is counted at the start of a step."""

    wall: float
    cpu: float
    read: int
    written: int
    disk_seconds: float
    device_read: int
    waiting: float


@dataclass(frozen=True, slots=True)
class Step:
    """Of one step."""

    wall: float
    cpu: float
    read: float
    written: float
    disk_seconds: float
    device_read: float
    waiting: float


def _model(kind: str) -> nn.Module:
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers[:-2])
    if kind == "frozen":
        model[:-1].requires_grad_(requires_grad=False)
    return model


def _device_read() -> int:
    """Bytes that this process has had from storage, as the kernel counts them; 0 where it does not say."""
    path = Path("/proc/self/io")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


def _run(case: Case, folder: Path | None, link: str | None, *, ahead: bool = True) -> Step:
    marks: list[Mark] = []
    x, steps = torch.randn(case.rows, WIDTH), case.steps

    def mark() -> None:
        stats = pool.stats()
        disk, (device,) = stats.disk, stats.devices.values()
        read, written, seconds = (
            (0, 0, 0.0) if disk is None else (disk.bytes_read, disk.bytes_written, disk.busy_seconds)
        )
        cpu = sum(os.times()[:2])
        marks.append(Mark(time.perf_counter(), cpu, read, written, seconds, _device_read(), device.waiting_seconds))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(WARM_UP + steps):
            mark()
            yield x, x
        mark()

    task = TrainTask(
        model=partial(_model, case.kind),
        param_groups=lambda model: [p for p in model.parameters() if p.requires_grad],
        optimizer=case.optimizer,
        loss=nn.MSELoss(),
        train=batches,
        epochs=1,
    )
    host = int(case.state_bytes * case.host) if folder else 2**33
    with HydraExecutor(
        devices="cpu:1",
        device_memory=case.device_bytes,
        host_memory=host,
        spill_dir=folder,
        num_shards="layer",
        link_bandwidth=link,
        buffer_fraction=0.15 if ahead else 0,
    ) as pool:
        (result,) = pool.run([task])
        if result.error is not None:
            raise result.error
    kept = marks[-steps - 1 :]
    wall = statistics.median(b.wall - a.wall for a, b in pairwise(kept))
    first, last = kept[0], kept[-1]
    return Step(
        wall,
        *(
            (getattr(last, name) - getattr(first, name)) / steps
            for name in ("cpu", "read", "written", "disk_seconds", "device_read", "waiting")
        ),
    )


def _alone(folder: Path, read: float, written: float) -> tuple[float, bool]:
    """Seconds that the disk takes for so many bytes, in files of a layer's parameters, reads and writes in turn."""
    disk = SpillDisk(SpillFolder(folder))
    data = torch.ones(LAYER_BYTES, dtype=torch.uint8)
    counts = {disk.read: round(read / LAYER_BYTES), disk.write: round(written / LAYER_BYTES)}
    total = sum(counts.values())
    try:
        for number in range(1, total + 1):
            disk.write(number, data)
        start = time.perf_counter()
        for number in range(1, total + 1):
            reads = number * counts[disk.read] // total - (number - 1) * counts[disk.read] // total
            (disk.read if reads else disk.write)(number, data)
        seconds = time.perf_counter() - start
        return seconds * (read + written) / (total * LAYER_BYTES), disk.is_direct
    finally:
        disk.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", help="where the files lie; default: the system's folder for temporary files"
    )
    parser.add_argument("--rows", type=int, action="append", help=f"samples of a batch; default: {ROWS}")
    parser.add_argument("--link", help="bandwidth of the device's link; default: as fast as it is")
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    parser.add_argument(
        "--light", action="store_true", help="SGD with momentum: little to compute for the bytes it moves"
    )
    parser.add_argument("--frozen", action="store_true", help="only the last layer is trained")
    parser.add_argument("--host", type=int, default=50, help="percent of the state that the host holds  [50]")
    given = parser.parse_args()
    kind = "frozen" if given.frozen else "light" if given.light else "adamw"
    cases = [Case(rows, given.steps, kind, given.host / 100) for rows in given.rows or ROWS]
    print(f"state {cases[0].state_bytes / 1e6:.0f} MB, of which the host holds {given.host}%; {os.cpu_count()} cores")
    print(
        "rows | step on host | of it CPU | on disk, nothing ahead | of it waiting | step, on disk | of it waiting | "
        "of it CPU | read MB (kernel's count) | written MB | disk's thread | disk alone | reached"
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        for case in cases:
            host, waiting = _run(case, None, given.link), _run(case, folder, given.link, ahead=False)
            before, is_direct = _alone(folder, waiting.read, waiting.written)
            spilled = _run(case, folder, given.link)
            after, _ = _alone(folder, spilled.read, spilled.written)
            alone = (before + after) / 2
            print(
                f"{case.rows:4} | {host.wall:.3f} s | {host.cpu:.3f} s | {waiting.wall:.3f} s | {waiting.waiting:.3f} s | "
                f"{spilled.wall:.3f} s | {spilled.waiting:.3f} s | {spilled.cpu:.3f} s | "
                f"{spilled.read / 1e6:.0f} ({spilled.device_read / 1e6:.0f}) | {spilled.written / 1e6:.0f} | "
                f"{spilled.disk_seconds:.3f} s | {alone:.3f} s ({'O_DIRECT' if is_direct else 'buffered'}) | "
                f"{max(host.wall, alone) / spilled.wall:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
