"""The models and tasks that parity is checked on: small, and each with one trait that has broken such engines before.

Importable in a fresh process, where the reference runs. Every task trains 20 steps.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune.task import TrainTask

NUM_STEPS = 20


class MLP(nn.Module):
    """Dropout between every two layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 32, 32, 32, 32, 32, 4]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, x):
        return self.layers(x)


class CNN(nn.Module):
    """BatchNorm after every convolution, and skips that reach over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        early = x = functional.relu(self.stem(x), inplace=True)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = functional.relu(norm(conv(x)))
            if i == 3:
                middle = x
            if i == 5:
                x = x + early
        return self.head((x + middle).mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.attention_dropout = heads, causal, attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.attention_dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Patches by convolution, a class token, a learned position that every batch shares."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.Sequential(*[Block(16, 2, 0.0, causal=False) for _ in range(4)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT2(nn.Module):
    """Input and output embeddings are one parameter, used by the first and the last shard; dropout in every block."""

    def __init__(self, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, 16)
        self.position = nn.Embedding(12, 16)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(16, 2, 0.1, True, attention_dropout) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DropoutCNN(nn.Module):
    """Whole channels dropped after every convolution, and other kinds of noise; wide enough for the fast kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, 16, 3, padding=1) for i in (1, *[16] * 7))
        self.norm = nn.BatchNorm2d(16)
        self.drop, self.alpha = nn.Dropout2d(0.2), nn.FeatureAlphaDropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = functional.rrelu(conv(x), training=self.training)
            x = self.alpha(x) if i % 3 == 1 else self.drop(x)
        if self.training:
            with torch.no_grad():
                noise = torch.randn_like(x)
            x = x + 0.1 * noise
        return self.head(self.norm(x).mean(dim=(2, 3)))


class NativeMLP(nn.Module):
    """Dropout of a kind that can only draw from torch's default generator, in every other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = functional.relu(layer(x))
            x = functional.dropout(x, 0.2, self.training) if i % 2 else torch.native_dropout(x, 0.2, self.training)[0]
        return self.head(x)


def next_token_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of predicting each token from those before it, for batches that are dicts."""
    logits = module(batch["ids"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def accuracy(module: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """What a classifier is evaluated by."""
    logits = module(batch[0])
    return {"acc": (logits.argmax(1) == batch[1]).float().mean(), "loss": functional.cross_entropy(logits, batch[1])}


def _vectors(count: int) -> TensorDataset:
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def _images(count: int) -> TensorDataset:
    """The label is the brightest quarter."""
    images = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    return TensorDataset(images, functional.avg_pool2d(images, 4).flatten(1).argmax(dim=1))


def _texts(count: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(23, (count, 12), generator=generator)
    return DataLoader([{"ids": row} for row in ids], batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]


def _mlp(**changes: Any) -> TrainTask:
    """20 steps in 4 epochs, the last batch of each a partial one; validated at every step; a scheduler led by that."""
    arguments = {
        "model": MLP,
        "loss": functional.cross_entropy,
        "train": _vectors(75),
        "validate": _vectors(20),
        "report_every": 1,
        "batch_size": 16,
        "epochs": 4,
        "scheduler": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
    }
    return _task(arguments | changes)


def _cnn(**changes: Any) -> TrainTask:
    """20 steps in 4 epochs, the last batch of each a partial one; accuracy too, at every step."""
    arguments = {
        "model": CNN,
        "loss": functional.cross_entropy,
        "train": _images(36),
        "validate": _images(12),
        "evaluate": accuracy,
        "metric": "val_acc",
        "report_every": 1,
        "batch_size": 8,
        "epochs": 4,
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.7),
    }
    return _task(arguments | changes)


def _vit(**changes: Any) -> TrainTask:
    """20 steps in 2 epochs, reported at each step, with a schedule that moves the betas at every step."""
    arguments = {
        "model": ViT,
        "loss": functional.cross_entropy,
        "train": _images(80),
        "batch_size": 8,
        "epochs": 2,
        "scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=3e-3, total_steps=NUM_STEPS),
        "scheduler_interval": "step",
        "report_every": 1,
    }
    return _task(arguments | changes)


def _decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def _gpt2(**changes: Any) -> TrainTask:
    """20 steps in 4 epochs from a `DataLoader` of dicts, with a step function and parameter groups."""
    arguments = {
        "model": GPT2,
        "step": next_token_loss,
        "train": _texts(38, 8),
        "param_groups": _decay_groups,
        "epochs": 4,
        "report_every": 1,
    }
    return _task(arguments | changes)


def _task(arguments: dict[str, Any]) -> TrainTask:
    return TrainTask(**({"optimizer": partial(torch.optim.AdamW, lr=3e-3), "seed": 5} | arguments))


MODELS: dict[str, Callable[..., TrainTask]] = {"mlp": _mlp, "cnn": _cnn, "vit": _vit, "gpt2": _gpt2}
VARIANTS = MODELS | {
    "cnn_by_epoch": partial(_cnn, report_every="epoch"),
    "gpt2_attention": partial(_gpt2, model=partial(GPT2, attention_dropout=0.2)),
    "gpt2_bfloat16": partial(_gpt2, model=partial(GPT2, attention_dropout=0.2), precision="bfloat16"),
    "cnn_dropout": partial(_cnn, model=DropoutCNN),
    "mlp_native": partial(_mlp, model=NativeMLP),
}


def build(name: str, **changes: Any) -> TrainTask:
    """A fresh task; the same name and changes give equal tasks in every process."""
    return VARIANTS[name](**changes)
