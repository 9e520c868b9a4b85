"""A transformer without dropout, of any size; and the trial of most benchmarks, over 70 ms per step on one thread."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask

VOCABULARY, LENGTH, BATCH_SIZE = 64, 64, 16
WIDTH, HEADS, DEPTH = 128, 4, 4


class Block(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # noqa: D102
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        depth: int = DEPTH,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):  # noqa: D102
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.position)))


def loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(seed: int, num_steps: int) -> TrainTask:
    """One trial of `num_steps` steps; all trials are equal but for their seed."""
    ids = torch.randint(VOCABULARY, (num_steps * BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=Transformer,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=loss,
        train=TensorDataset(ids, ids.roll(-1, dims=1)),
        batch_size=BATCH_SIZE,
        seed=seed,
    )
