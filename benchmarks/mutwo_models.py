"""The models of μ-TWO's Table 1 in plain PyTorch, at several scales; needs torch alone.

`table`: parameters and batch sizes of that table (the smaller of its two). It has 60M for the ViT, which is 8 layers of width
768; the lengths of texts are not in it, and are 128 here. `cpu`: few and narrow layers, for steps of milliseconds on one
thread. `tiny`: as deep as `table` and as narrow as can be: its graphs in little time. `large`: two that are not in the table,
with maps of megabytes, whose copies on a CPU are made by another thread. Attention is written out, as softmax of a
product, so that it is traced alike on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SCALES = ("tiny", "cpu", "large", "table")


@dataclass(frozen=True)
class Model:
    """One of the table's.

    Attributes:
        build: makes it.
        draw: makes a batch of it and targets.
        loss: of its scores and targets.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any] = functional.cross_entropy


class CNN(nn.Module):
    """Convolutions with batch norm; not in the table."""

    def __init__(self, widths):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise((3, *widths)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        """Class scores."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class MLP(nn.Module):
    """Square layers; not in the table."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 10)

    def forward(self, x):
        """Class scores."""
        for layer in self.layers:
            x = functional.relu(layer(x))
        return self.head(x)


class Tuned(nn.Module):
    """Layers that train, with dropout, on top of frozen ones, of which the backward needs no maps; not in the table."""

    def __init__(self, width, frozen, depth):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(frozen))
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 10)

    def forward(self, x):
        """Class scores."""
        for layer in self.frozen:
            x = functional.relu(layer(x))
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.1, self.training)
        return self.head(x)


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, and what came in."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        shapes = ((width_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.short = None
        if stride > 1 or width_in != 4 * width:
            short = nn.Conv2d(width_in, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        """`(batch, width_in, height, width)` to `(batch, 4 width, height / stride, width / stride)`."""
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if number < 2:
                y = functional.relu(y)
        return functional.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    """Bottlenecks; `(3, 4, 23, 3)` of width 64 are ResNet-101, whose stem is a convolution of 7 and a pool."""

    def __init__(self, depths, width, classes, *, stem):
        super().__init__()
        first = nn.Conv2d(3, width, 7, 2, 3, bias=False) if stem else nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1) if stem else nn.Identity()
        blocks, width_in = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(width_in, width << stage, 2 if stage and not number else 1))
                width_in = 4 * (width << stage)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width_in, classes)

    def forward(self, x):
        """Class scores."""
        return self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


class HardSwish(nn.Module):
    """Written out, as a product."""

    def forward(self, x):
        """As it comes."""
        return x * functional.relu6(x + 3) / 6


class Separable(nn.Module):
    """MobileNet v3's block: wider by 1x1, depthwise, squeezed and excited, narrower by 1x1."""

    def __init__(self, width_in, kernel, inner, width, squeezes, swishes, stride):
        super().__init__()
        self.act = HardSwish() if swishes else nn.ReLU()
        self.up = nn.Conv2d(width_in, inner, 1, bias=False) if inner != width_in else nn.Identity()
        self.deep = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        self.down = nn.Conv2d(inner, width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(one) for one in (inner, inner, width))
        few = max(8, inner // 32 * 8)
        self.squeeze = nn.Sequential(nn.Linear(inner, few), nn.ReLU(), nn.Linear(few, inner)) if squeezes else None
        self.adds = stride == 1 and width_in == width

    def forward(self, x):
        """`(batch, width_in, height, width)` to `(batch, width, height / stride, width / stride)`."""
        y = x if isinstance(self.up, nn.Identity) else self.act(self.norms[0](self.up(x)))
        y = self.act(self.norms[1](self.deep(y)))
        if self.squeeze is not None:
            y = y * functional.hardsigmoid(self.squeeze(y.mean((2, 3))))[:, :, None, None]
        y = self.norms[2](self.down(y))
        return x + y if self.adds else y


# kernel, inner width, width, squeezes, swishes, stride
LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


class MobileNet(nn.Module):
    """MobileNet v3, large, of these rows."""

    def __init__(self, rows, last, hidden, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), HardSwish())
        widths = [16, *(row[2] for row in rows)]
        self.blocks = nn.Sequential(*(Separable(width, *row) for width, row in zip(widths, rows, strict=False)))
        self.top = nn.Sequential(nn.Conv2d(widths[-1], last, 1, bias=False), nn.BatchNorm2d(last), HardSwish())
        self.head = nn.Sequential(nn.Linear(last, hidden), HardSwish(), nn.Linear(hidden, classes))

    def forward(self, x):
        """Class scores."""
        return self.head(self.top(self.blocks(self.stem(x))).mean((2, 3)))


class Layer(nn.Module):
    """A transformer's, normalised before each half."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x, mask):
        """`(batch, length, width)`, as it comes; `mask`, `(length, length)`, is added to scores of attention."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (w // self.heads) ** -0.5 + mask, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Layers on what an embedding makes; scores of the mean, or of each place by the embedding's own rows."""

    def __init__(self, embedding, length, width, heads, depth, classes):
        super().__init__()
        self.embedding, self.positions = embedding, nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes) if classes else None
        mask = torch.zeros(length, length)
        self.register_buffer("mask", mask if classes else mask.masked_fill(torch.ones_like(mask).triu(1) > 0, -1e9))

    def forward(self, x):
        """`(batch, classes)`; without classes, `(batch, length, tokens)`."""
        x = self.embedding(x) + self.positions
        for layer in self.layers:
            x = layer(x, self.mask)
        x = self.norm(x)
        return functional.linear(x, self.embedding.weight) if self.head is None else self.head(x.mean(1))


class Patches(nn.Module):
    """Images as tokens."""

    def __init__(self, side, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, side, side)

    def forward(self, x):
        """`(batch, 3, height, width)` to `(batch, patches, width)`."""
        return self.conv(x).flatten(2).transpose(1, 2)


class DLRM(nn.Module):
    """Tables, two MLPs and the products between; the first 13 columns are numbers, the others rows of the tables."""

    def __init__(self, num_tables, rows, width, hidden):
        super().__init__()
        self.rows, count = rows, num_tables + 1
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + count**2, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x):
        """Class scores."""
        dense, ids = self.bottom(x[:, :13]), x[:, 13:].long()
        found = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([dense, (found @ found.transpose(1, 2)).flatten(1)], 1))


def _rows(count, width, classes):
    return torch.randn(count, width), torch.randint(classes, (count,))


def _images(count, side, classes):
    return torch.randn(count, 3, side, side), torch.randint(classes, (count,))


def _texts(count, length, tokens, classes):
    ids = torch.randint(tokens, (count, length))
    return ids, torch.randint(classes, (count,)) if classes else ids.roll(-1, 1)


def _items(count, num_tables, rows):
    ids = torch.randint(rows, (count, num_tables)).float()
    return torch.cat([torch.randn(count, 13), ids], 1), torch.randint(2, (count,))


def _of_tokens(scores, targets):
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _vit(count, side, patch, width, heads, depth):
    def build():
        return Transformer(Patches(patch, width), (side // patch) ** 2, width, heads, depth, 1000)

    return Model(build, partial(_images, count, side, 1000))


def _text(count, length, tokens, width, heads, depth, classes):
    def build():
        embedding = nn.Embedding(tokens, width)
        nn.init.normal_(embedding.weight, std=0.02)
        return Transformer(embedding, length, width, heads, depth, classes)

    loss = functional.cross_entropy if classes else _of_tokens
    return Model(build, partial(_texts, count, length, tokens, classes), loss)


def _dlrm(count, num_tables, rows, width, hidden):
    return Model(partial(DLRM, num_tables, rows, width, hidden), partial(_items, count, num_tables, rows))


def _resnet(depths, width, count, side, classes, *, stem):
    return Model(partial(ResNet, depths, width, classes, stem=stem), partial(_images, count, side, classes))


def _mobilenet(rows, last, hidden, count, side, classes):
    return Model(partial(MobileNet, rows, last, hidden, classes), partial(_images, count, side, classes))


_DEEP = (3, 4, 23, 3)
MODELS = {
    "vit": {"tiny": (2, 8, 4, 8, 2, 8), "cpu": (8, 32, 4, 64, 4, 3), "table": (8, 224, 16, 768, 12, 8)},
    "mobilenet": {
        "tiny": (LARGE, 16, 16, 2, 32, 10),
        "cpu": (LARGE[:5], 64, 64, 16, 32, 10),
        "table": (LARGE, 960, 1280, 64, 224, 1000),
    },
    "resnet": {
        "tiny": (_DEEP, 2, 2, 16, 10),
        "cpu": ((1, 1, 1), 8, 8, 16, 10),
        "table": (_DEEP, 64, 48, 224, 1000),
    },
    "bert": {
        "tiny": (2, 4, 16, 8, 2, 12, 2),
        "cpu": (8, 32, 256, 64, 4, 3, 2),
        "table": (16, 128, 30522, 768, 12, 12, 2),
    },
    "gpt2": {
        "tiny": (2, 4, 16, 8, 2, 12, 0),
        "cpu": (8, 32, 256, 64, 4, 3, 0),
        "table": (8, 128, 50257, 768, 12, 12, 0),
    },
    "dlrm": {"tiny": (8, 26, 10, 4, 8), "cpu": (256, 6, 100, 16, 128), "table": (512, 26, 24000, 64, 512)},
    "cnn": {"cpu": ((16, 16, 32, 32), 16, 16), "large": ((16, 16, 16, 16, 16), 8, 64)},
    "mlp": {"large": (4096, 256, 8)},
    "tuned": {"large": (2048, 256, 20, 3)},
}
"""The arguments of each one's maker, by scale."""


def model(name: str, scale: str) -> Model:
    """One of `MODELS`.

    Args:
        name: of it.
        scale: of `SCALES`.

    Raises:
        KeyError: it is not there at this scale.
    """
    given: Any = MODELS[name][scale]
    if name == "cnn":
        widths, count, side = given
        return Model(partial(CNN, widths), partial(_images, count, side, 10))
    if name == "mlp":
        count, width, depth = given
        return Model(partial(MLP, width, depth), partial(_rows, count, width, 10))
    if name == "tuned":
        count, width, frozen, depth = given
        return Model(partial(Tuned, width, frozen, depth), partial(_rows, count, width, 10))
    if name == "resnet":
        return _resnet(*given, stem=scale == "table")
    makers: dict[str, Any] = {"vit": _vit, "mobilenet": _mobilenet, "bert": _text, "gpt2": _text, "dlrm": _dlrm}
    made: Model = makers[name](*given)
    return made
