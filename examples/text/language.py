"""Two language models, written as one would without hydra-tune: GPT-like (causal) and BERT-like (masked).

The two build functions take hyperparameters and return a `TrainTask`: a description of the training run, which costs
nothing until the pool trains it.
"""

import math
from functools import partial

import corpus
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=self.causal)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """A transformer whose output layer is its embedding; causal as GPT is, or seeing both ways as BERT does."""

    def __init__(self, vocabulary, width, depth, context, dropout, *, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(width**-0.5 * torch.randn(context, width))
        # Among bytes a masked model must first find its neighbours; a convolution does that for it, as CANINE's does.
        self.near = None if causal else nn.Conv1d(width, width, kernel_size=7, padding=3)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout, causal=causal) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        # BERT puts a layer between its blocks and the words; GPT does not.
        layer = [] if causal else [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        self.transform = nn.Sequential(*layer)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens):
        """Tokens (batch, context) to logits (batch, context, vocabulary)."""
        x = self.drop(self.embedding(tokens) + self.position[: tokens.shape[1]])
        if self.near is not None:
            x = x + functional.gelu(self.near(x.transpose(1, 2))).transpose(1, 2)
        x = self.transform(self.norm(self.blocks(x)))
        return functional.linear(x, self.embedding.weight, self.bias)


def loss(logits, targets):
    """Cross entropy in nats per token that counts."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=corpus.IGNORED)


def evaluate_causal(bytes_per_token, module, batch):
    """The loss of a batch, and the same in bits per byte, which does not depend on what a token is."""
    tokens, targets = batch
    value = loss(module(tokens), targets)
    return {"loss": value, "bits_per_byte": value / (math.log(2) * bytes_per_token)}


def evaluate_masked(module, batch):
    """The loss of the hidden tokens, and how many are guessed; every window hides equally many."""
    tokens, targets = batch
    logits = module(tokens)
    counted = targets != corpus.IGNORED
    right = (logits.argmax(dim=-1) == targets) & counted
    return {"loss": loss(logits, targets), "acc": right.sum() / counted.sum()}


def build_causal(
    *, data=None, words=511, width=64, depth=3, lr=3e-3, dropout=0.0, batch_size=8, context=64, windows=384, epochs=5
):
    """Describe the training of a causal model; reports `val_bits_per_byte` and `val_loss`."""
    text = load(data, words, context)
    validation, bytes_per_token = corpus.held_out(text, context, corpus.next_token)
    return _task(
        partial(LanguageModel, text.vocabulary, width, depth, context, dropout, causal=True),
        corpus.Windows(text.train, context, windows, corpus.next_token, seed=0),
        validation,
        partial(evaluate_causal, bytes_per_token),
        metric="val_bits_per_byte",
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
    )


def build_masked(
    *, data=None, words=0, width=64, depth=3, lr=3e-3, dropout=0.0, batch_size=8, context=64, windows=384, epochs=5
):
    """Describe the training of a masked model; reports `val_loss` and `val_acc`, of hidden tokens."""
    text = load(data, words, context)
    validation, _ = corpus.held_out(text, context, corpus.hidden)
    return _task(
        partial(LanguageModel, text.vocabulary, width, depth, context, dropout, causal=False),
        corpus.Windows(text.train, context, windows, corpus.hidden, seed=0),
        validation,
        evaluate_masked,
        metric="val_loss",
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
    )


def load(data, words, context):
    """The text as tokens, long enough for windows of this context."""
    text = corpus.load(data, words)
    if min(len(text.train), len(text.validation)) <= context:
        raise ValueError(
            f"data: {data} is too short: its last tenth, kept for validation, is {len(text.validation)} tokens, and one window "
            f"of context {context} needs {context + 1}; give a longer text, or a smaller context"
        )
    return text


def _task(model, train, validation, evaluate, *, metric, lr, batch_size, epochs):
    num_steps = epochs * -(-len(train) // batch_size)
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=0.01),
        loss=loss,
        train=train,
        validate=validation,
        evaluate=evaluate,
        metric=metric,
        epochs=epochs,
        batch_size=batch_size,
        max_grad_norm=1.0,
        scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=num_steps),
        scheduler_interval="step",
    )
