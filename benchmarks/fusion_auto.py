"""CPU seconds of whole runs through the pool, of the same trials with fusion off, and left to the pool; ratios within one run.

    python benchmarks/fusion_auto.py [mlp] [cnn] [transformer] [wide] [images] [resnet]

One CPU device, one intra-op thread. Each run is of a pool of its own, so that building, capturing and the steps that "auto"
times are counted. The two take turns: off, auto, auto, off.
"""

import sys
import time
from functools import partial

import torch
from fusion import Transformer, cnn, mlp
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask

ORDER = ("off", "auto", "auto", "off")


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a skip."""

    def __init__(self, channels):
        super().__init__()
        convolution = partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False)
        self.inner = nn.Sequential(
            convolution(), nn.BatchNorm2d(channels), nn.ReLU(), convolution(), nn.BatchNorm2d(channels)
        )

    def forward(self, x):
        """The sum of both."""
        return functional.relu(x + self.inner(x))


def resnet():
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
    ]
    return nn.Sequential(*stem, *body, Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def wide():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def images():
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 10))


CASES = {  # model, inputs of so many samples, batch size, trials, steps of each
    "mlp": (mlp, lambda count: torch.randn(count, 64), 32, 16, 320),
    "cnn": (cnn, lambda count: torch.randn(count, 1, 8, 8), 32, 16, 160),
    "transformer": (Transformer, lambda count: torch.randint(64, (count, 16)), 8, 16, 160),
    "wide": (wide, lambda count: torch.randn(count, 256), 128, 8, 160),
    "images": (images, lambda count: torch.randn(count, 3, 32, 32), 16, 8, 80),
    "resnet": (resnet, lambda count: torch.randn(count, 3, 32, 32), 8, 8, 80),
}


def run(name, fusion):
    """CPU seconds of a run, and with how many others its trials were computed."""
    build, inputs, batch_size, count, steps = CASES[name]
    torch.manual_seed(0)
    x = inputs(8 * batch_size)
    y = torch.randint(10, (len(x),))
    tasks = [
        TrainTask(
            model=build,
            optimizer=partial(torch.optim.AdamW, lr=1e-3 / (number + 1)),
            train=TensorDataset(x, y),
            batch_size=batch_size,
            loss=functional.cross_entropy,
            epochs=steps // 8,
            seed=number,
        )
        for number in range(count)
    ]
    start = time.process_time()
    with HydraExecutor(devices="cpu:1", device_memory="2GiB", fusion=fusion) as pool:
        results = pool.run(tasks)
    seconds = time.process_time() - start
    assert all(result.status == "completed" for result in results), results[0].error
    return seconds, max(result.group_size for result in results)


def main():
    torch.set_num_threads(1)
    run("mlp", "on")  # whatever is done once in a process
    print("model        trials  steps       off      auto  off / auto  together")
    for name in sys.argv[1:] or CASES:
        seconds = {"off": 0.0, "auto": 0.0}
        sizes = set()
        for fusion in ORDER:
            taken, size = run(name, fusion)
            print(f"    {fusion} {taken:.2f} s", file=sys.stderr)
            seconds[fusion] += taken / 2
            sizes |= {size} if fusion == "auto" else set()
        ratio = seconds["off"] / seconds["auto"]
        shown = " and ".join(map(str, sorted(sizes)))
        _, _, _, count, steps = CASES[name]
        print(
            f"{name:12} {count:6} {steps:6} {seconds['off']:7.2f} s {seconds['auto']:7.2f} s {ratio:10.2f}x {shown:>9}",
            flush=True,
        )


if __name__ == "__main__":
    main()
