"""The models of `gpu_fusion.py`, their steps in plain PyTorch, and a process that makes such steps when it is told to.

    python benchmarks/gpu_models.py cuda 1.5    # reads a model's name, says "ready", reads "go", says steps per second; again

Knows torch alone, so that many processes are there soon.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

WARM_UPS, BETWEEN_LOOKS = 3, 5


class Encoder(nn.Module):
    """Transformer layers on embedded tokens, and class scores of their mean."""

    def __init__(self, embedding, length, width, heads, depth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
        self.embedding, self.positions = embedding, nn.Parameter(torch.zeros(length, width))
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Class scores."""
        return self.head(self.layers(self.embedding(x) + self.positions).mean(1))


class Patches(nn.Module):
    """Images as tokens."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, 4)

    def forward(self, x):
        """`(batch, 3, 32, 32)` to `(batch, 64, width)`."""
        return self.conv(x).flatten(2).transpose(1, 2)


def cnn():
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 10))


def images():
    return torch.randn(32, 3, 32, 32)


def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8), nn.ReLU(), nn.Linear(8, 10))


MODELS = {
    "cnn": (cnn, images),
    "vit": (lambda: Encoder(Patches(64), 64, 64, 4, 4), images),
    "bert": (lambda: Encoder(nn.Embedding(1000, 128), 64, 128, 4, 4), lambda: torch.randint(1000, (16, 64))),
    "tiny": (tiny, lambda: torch.randn(4, 3, 8, 8)),  # for a rehearsal
}


def batch(name, device):
    x = MODELS[name][1]()
    return x.to(device), torch.randint(10, (len(x),), device=device)


def one_step(name, device):
    """A step of one model."""
    model, (x, y) = MODELS[name][0]().to(device), batch(name, device)
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def run():
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def settle(device):
    if device != "cpu":
        torch.cuda.synchronize(device)


def rate(run, device, seconds):
    """Runs per second, with the device idle before and after."""
    for _ in range(WARM_UPS):
        run()
    settle(device)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(BETWEEN_LOOKS):
            run()
        settle(device)
        done += BETWEEN_LOOKS
    return done / (time.perf_counter() - start)


def serve(device, seconds):
    """Until there is nothing more to read."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        run = one_step(line.strip(), device)
        for _ in range(WARM_UPS):
            run()
        settle(device)
        print("ready", flush=True)
        sys.stdin.readline()
        print(rate(run, device, seconds), flush=True)
        del run


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
