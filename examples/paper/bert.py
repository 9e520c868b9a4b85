"""HYDRA's first workload: masked-language modelling with a BERT of about a billion parameters, on WikiText-2."""

from functools import partial

import torch
from encoder import Block, initialise
from text import IGNORED, read
from torch import nn
from torch.nn import functional

from hydra_tune import ShapesOnly, TrainTask

WIKITEXT_2_TOKENS = 2_088_628  # to train on; validation has 217,646


class Embeddings(nn.Module):
    """Words and their places, (batch, tokens) -> (batch, tokens, width)."""

    def __init__(self, vocabulary: int, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words):
        return self.dropout(self.norm(self.words(words) + self.places))


class Bert(nn.Module):
    """An encoder with BERT's masked-language head, which shares its matrix with the word embeddings."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, tokens, width, dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout, norm_first=False) for _ in range(layers)])
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.predict = nn.Linear(width, vocabulary)
        initialise(self)
        self.predict.weight = self.embeddings.words.weight

    def forward(self, words):
        """(batch, tokens) words -> (batch, tokens, vocabulary)."""
        return self.predict(self.transform(self.blocks(self.embeddings(words))))


def loss(logits, labels):
    """Mean over the places that are asked for."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build(
    *, batch_size, lr, data=None, layers=77, width=1024, heads=16, tokens=128, vocabulary=30522, epochs=4, seed=0
):
    """Describe the training of a `Bert`.

    Args:
        batch_size: sequences.
        lr: of AdamW.
        data: WikiText-2, see `text.read`; None: only to plan, with batches of the right shape.
        layers, width, heads: 24, 1024 and 16 are BERT-Large.
        tokens: of a sequence.
        vocabulary: words.
        epochs: over the text.
        seed: of the trial's random streams.
    """
    if data is None:
        each = tokens - 1
        sample = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
        train, validation = (ShapesOnly(sample, words // each) for words in (WIKITEXT_2_TOKENS, 217_646))
    else:
        train, validation = read(data, vocabulary, tokens)
    return TrainTask(
        model=partial(Bert, vocabulary, tokens, width, layers, heads, dropout=0.1),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss=loss,
        train=train,
        validate=validation,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
