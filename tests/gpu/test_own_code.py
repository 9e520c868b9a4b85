"""The user's own code on a GPU, in bursts: the bits of the plain loop there, dropout included, whatever else is in the pool."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.pool.job import OVER
from hydra_tune.train.loop import burst
from tests.gpu.bits import assert_same_bits, bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
PATIENCE_SECONDS = 300
GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(256, 512, generator=GENERATOR), torch.randint(8, (256,), generator=GENERATOR)
STATE_BYTES = 3 * 4 * (512 * 512 * 4 + 512 * 8)  # parameters, and what AdamW keeps


class Net(nn.Module):
    """Draws, has running statistics, and replaces a buffer at each step."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(512, 512) for _ in range(4)), nn.BatchNorm1d(512)
        self.head = nn.Linear(512, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = functional.dropout(torch.relu(layer(x)), 0.2, self.training)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().std()
        return self.head(self.norm(x)) / self.scale


class Recurrent(nn.Module):
    """Drops values between its layers, by masks that cuDNN draws from a state of its own."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 24, 3, batch_first=True, dropout=0.4), nn.Linear(24, 8)

    def forward(self, x):
        return self.head(self.layers(x.view(-1, 16, 32))[0][:, -1])


def task(seed, **changes):
    arguments = {
        "model": Net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:64], Y[:64]),
        "batch_size": 32,
        "loss": functional.cross_entropy,
        "epochs": 3,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def plain(seed, **changes):
    return bits(train_plain(task(seed, **changes), device="cuda:0"))


@pytest.mark.parametrize("seconds", [0.0, 3600.0], ids=["a step in each burst", "all steps in one burst"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": partial(torch.optim.Adagrad, lr=1e-2)},
        {"precision": "bfloat16"},
        {"model": Recurrent},
        {"precision": "float16", "accumulate": 2, "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_one_trial_gives_the_plain_bits(changes, seconds, monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", seconds)
    with HydraExecutor("cuda:0", "1GiB") as pool:
        (result,) = pool.run([task(5, **changes)])
        assert pool.stats().devices["cuda:0"].resident_bytes == 0
    assert_same_bits([bits(result)], [plain(5, **changes)])


def test_trials_that_do_not_fit_together_give_the_plain_bits_within_the_budget():
    budget = 3 * STATE_BYTES
    with HydraExecutor("cuda:0", budget, max_concurrent=4) as pool:
        results = pool.run([task(seed) for seed in range(4)])
        device = pool.stats().devices["cuda:0"]
    assert_same_bits([bits(result) for result in results], [plain(seed) for seed in range(4)])
    assert device.bytes_out > 0
    assert device.peak_bytes <= budget


def test_a_trial_that_is_saved_within_its_bursts_goes_on_with_the_same_masks(tmp_path):
    """After the second of three epochs."""
    with HydraExecutor("cuda:0", "1GiB", checkpoint_dir=tmp_path, checkpoint_every=1) as pool:
        events = pool.events()
        job = pool.submit(task(5), "trial", events)
        while job.state not in OVER:
            event = events.get(PATIENCE_SECONDS)
            if not isinstance(event, Reported):
                continue
            if event.step == 1:
                pool.suspend([job])
                break
            event.job.proceed()
    with HydraExecutor("cuda:0", "1GiB", checkpoint_dir=tmp_path) as pool:
        result = pool.submit(task(5), "trial", resume_from=pool.find_checkpoint("trial").path).result(PATIENCE_SECONDS)
    assert_same_bits([bits(result)], [plain(5)])
