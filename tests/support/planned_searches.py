"""Searches drawn at random for small devices: trials of other epochs, rates, data and ends, which are pruned and paused."""

import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.pool.job import OVER, Reported
from tests.unit.pool.tasks import PATIENCE_SECONDS

KINDS = ("alike", "data", "batch", "dropout", "loss", "asks", "accumulate", "paused")
"""What trials of a search have each for themselves, or what is done to them."""
_FLYING = 6


class Net(nn.Module):
    """Activations that are large beside its parameters."""

    def __init__(self, norm, probability):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.drop, self.head = nn.Dropout(probability), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


class Asks(Net):
    """Its Python asks for values of the batch."""

    def forward(self, x):
        return super().forward(x * 1.5 if x.mean() > 0.0 else x)


def smoothed(output, target):
    """Another loss."""
    return functional.cross_entropy(output, target, label_smoothing=0.1)


def drawn_tasks(chance, kind, count):
    """So many trials; some have rates of which their losses are not finite."""
    norm = chance.choice([partial(nn.BatchNorm2d, 8), partial(nn.GroupNorm, 2, 8)])
    optimizer = chance.choice([torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop])
    schedules = chance.random() < 0.5
    made = torch.Generator().manual_seed(chance.randrange(1000))
    x, y = torch.randn(40, 3, 8, 8, generator=made, dtype=torch.float64), torch.randint(4, (40,), generator=made)

    def one(seed):
        rate = 1e200 if chance.random() < 0.1 else 10 ** chance.uniform(-4, -2)
        samples = chance.choice([16, 20, 29]) if kind == "data" else 20
        return TrainTask(
            model=partial(
                Asks if kind == "asks" else Net, norm, chance.uniform(0.1, 0.4) if kind == "dropout" else 0.2
            ),
            optimizer=partial(optimizer, lr=rate),
            scheduler=partial(ExponentialLR, gamma=0.9) if schedules else None,
            train=TensorDataset(x[:samples], y[:samples]),
            validate=TensorDataset(x[:8], y[:8]),
            batch_size=chance.choice([4, 8]) if kind == "batch" else 8,
            loss=chance.choice([functional.cross_entropy, smoothed]) if kind == "loss" else functional.cross_entropy,
            accumulate=2 if kind == "accumulate" else 1,
            epochs=chance.randint(1, 6),
            report_every=chance.choice(["epoch", 1, 2]),
            seed=seed,
        )

    return [one(seed) for seed in range(count)]


def searched(pool, tasks, ends, chance, *, pauses=False):
    """Train some trials, a few at a time, to their ends or to where they are pruned.

    Args:
        pool: where.
        tasks: theirs.
        ends: the number of a trial -> the number of its report at which it is pruned.
        chance: of answers that take a while, and of pauses.
        pauses: whether some are paused for a while.

    Returns:
        Their results.
    """
    events, waiting = pool.events(), list(enumerate(tasks))
    jobs, told, paused, over = {}, dict.fromkeys(range(len(tasks)), 0), {}, set()
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while len(over) < len(tasks):
        assert time.monotonic() < deadline, {number: job.state for number, job in jobs.items()}
        while waiting and len(jobs) - len(over) < _FLYING:
            number, one = waiting.pop(0)
            jobs[number] = pool.submit(one, str(number), events)
        event = events.get(0.05)
        if isinstance(event, Reported):
            number = int(event.job.name)
            if chance.random() < 0.15:
                time.sleep(chance.uniform(0.0, 0.1))
            if pauses and number not in paused and chance.random() < 0.2:
                event.job.pause()
                paused[number] = time.monotonic() + chance.uniform(0.0, 0.3)
            if told[number] == ends.get(number):
                event.job.prune()
            else:
                event.job.proceed()
            told[number] += 1
        for number in [number for number, until in paused.items() if time.monotonic() > until]:
            del paused[number]
            jobs[number].unpause()
        over = {number for number, job in jobs.items() if job.state in OVER}
    return [jobs[number].result(PATIENCE_SECONDS) for number in range(len(tasks))]


def differences_of(expected, found):
    """Where a result is not that of the same trial by itself, but for rounding in float64."""
    if expected.status != found.status:
        return [f"{expected.status}, and {found.status}: {found.error!r}"]
    if len(expected.history) != len(found.history):
        return [f"{len(expected.history)} reports, and {len(found.history)}"]
    pairs = [
        (f"report {number} {name}", torch.tensor(value), torch.tensor(other[name]))
        for number, (one, other) in enumerate(zip(expected.history, found.history, strict=True))
        for name, value in one.items()
        if name != "seconds"
    ]
    if expected.status == "completed":
        pairs += [(name, tensor, found.state_dict()[name]) for name, tensor in expected.state_dict().items()]
    return [name for name, one, other in pairs if not torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)]
