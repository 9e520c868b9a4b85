"""HYDRA's second workload: vision transformers of 300 million to 2 billion parameters, on CIFAR-10."""

from functools import partial

import torch
from encoder import Block, initialise
from images import read
from torch import nn
from torch.nn import functional

from hydra_tune import ShapesOnly, TrainTask


class Patches(nn.Module):
    """An image as tokens, a class token first: (batch, 3, size, size) -> (batch, 1 + patches, width)."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))

    def forward(self, images):
        tokens = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1) + self.places


class ViT(nn.Module):
    """A vision transformer, which classifies by its class token."""

    def __init__(self, size: int, patch: int, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = Patches(size, patch, width)
        self.blocks = nn.Sequential(*[Block(width, heads, 0.0, norm_first=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, images):
        """(batch, 3, size, size) -> (batch, classes)."""
        return self.head(self.norm(self.blocks(self.patches(images)))[:, 0])


def evaluate(module, batch):
    """Accuracy and loss; reported as `val_acc` and `val_loss`."""
    images, labels = batch
    logits = module(images)
    return {
        "acc": (logits.argmax(dim=1) == labels).float().mean(),
        "loss": functional.cross_entropy(logits, labels),
    }


def build(
    *, batch_size, layers, lr=1e-3, data=None, width=1024, heads=16, size=32, patch=8, classes=10, epochs=5, seed=0
):
    """Describe the training of a `ViT`.

    Args:
        batch_size: images.
        layers, width, heads: 24, 1024 and 16 are ViT-Large, of 300M parameters.
        lr: of AdamW.
        data: CIFAR-10 or another folder, see `images.read`; None: only to plan, with batches of the right shape.
        size, patch: of images and of the patches they are cut into, in pixels.
        classes: how many.
        epochs: over the images.
        seed: of the trial's random streams.
    """
    if data is None:
        sample = torch.zeros(3, size, size), torch.tensor(0)
        train, validation = ShapesOnly(sample, 50_000), ShapesOnly(sample, 10_000)
    else:
        train, validation = read(data, size, classes)
    return TrainTask(
        model=partial(ViT, size, patch, classes, width, layers, heads),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss=functional.cross_entropy,
        train=train,
        validate=validation,
        evaluate=evaluate,
        metric="val_acc",
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
