"""Handwritten digits: a vision transformer and a convolutional network, written as one would without hydra-tune.

Everything above `build_vit` is plain PyTorch. The two build functions take hyperparameters and return a `TrainTask`:
a description of the training run, which costs nothing until the pool trains it. The data are scikit-learn's bundled
8x8 digits, so nothing is downloaded.
"""

from functools import cache, partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask

NUM_TRAIN = 1408


@cache
def load() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training, validation): images (n, 1, 8, 8) of mean 0 and deviation 1, labels (n,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[validation], labels[validation])


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """A vision transformer that reads the 8x8 image as 16 patches of 2x2 pixels."""

    def __init__(self, width: int, depth: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.5 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class Residual(nn.Module):
    """Two 3x3 convolutions beside a skip."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.dropout(self.norm2(self.conv2(y))))


class CNN(nn.Module):
    """A small residual network: two blocks at 8x8, two at 4x4."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.high = nn.Sequential(*[Residual(channels, dropout) for _ in range(2)])
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.low = nn.Sequential(*[Residual(2 * channels, dropout) for _ in range(2)])
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images):
        x = self.low(self.down(self.high(self.stem(images))))
        return self.head(x.mean(dim=(2, 3)))


def mlp(dropout: float = 0.0) -> nn.Module:
    """Two hidden layers of 64."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def evaluate(module, batch):
    """Accuracy and loss of a batch; reported as `val_acc` and `val_loss`."""
    images, labels = batch
    logits = module(images)
    return {
        "acc": (logits.argmax(dim=1) == labels).float().mean(),
        "loss": functional.cross_entropy(logits, labels),
    }


def build_vit(*, lr=2e-3, width=64, depth=4, dropout=0.0, weight_decay=0.01, batch_size=64, epochs=8, seed=0):
    """Describe the training of a `ViT`."""
    model = partial(ViT, width=width, depth=depth, dropout=dropout)
    return _task(model, lr=lr, weight_decay=weight_decay, batch_size=batch_size, epochs=epochs, seed=seed)


def build_cnn(*, lr=2e-3, channels=16, dropout=0.0, weight_decay=0.01, batch_size=64, epochs=8, seed=0):
    """Describe the training of a `CNN`."""
    model = partial(CNN, channels=channels, dropout=dropout)
    return _task(model, lr=lr, weight_decay=weight_decay, batch_size=batch_size, epochs=epochs, seed=seed)


def build_mlp(*, lr=2e-3, momentum=0.9, weight_decay=1e-4, dropout=0.0, batch_size=64, epochs=8, seed=0):
    """Describe the training of a small multilayer perceptron."""
    train, validation = load()
    return TrainTask(
        model=partial(mlp, dropout=dropout),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        loss=functional.cross_entropy,
        train=train,
        validate=validation,
        evaluate=evaluate,
        metric="val_acc",
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )


def _task(model, *, lr, weight_decay, batch_size, epochs, seed):
    train, validation = load()
    num_steps = epochs * -(-len(train) // batch_size)
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay),
        loss=functional.cross_entropy,
        train=train,
        validate=validation,
        evaluate=evaluate,
        metric="val_acc",
        epochs=epochs,
        batch_size=batch_size,
        scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=num_steps),
        scheduler_interval="step",
        seed=seed,
    )
