"""A BERT of the transformers library, from a configuration, that tells which package a docstring's sentence is from.

Everything above `build` is what one would write without hydra-tune. `build` takes hyperparameters and returns a `TrainTask`: a
description of the training run, which costs nothing until the pool trains it.
"""

from functools import partial

import sentences
import torch

from hydra_tune import TrainTask

try:
    from transformers import BertConfig, BertForSequenceClassification
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "this example trains a BERT of Hugging Face's transformers, which is not installed; "
        "pip install 'hydra-tune[transformers]', or pip install -e '.[optuna,transformers]' in a clone",
        name=error.name,
    ) from None


def make(num_tokens: int, width: int, depth: int, dropout: float) -> BertForSequenceClassification:
    """A BERT with random weights; nothing is downloaded."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=num_tokens,
            max_position_embeddings=sentences.LENGTH,
            pad_token_id=sentences.PAD,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=len(sentences.PACKAGES),
        )
    )


def step(module, batch):
    """The loss, which the model computes itself from a dict batch with labels."""
    return module(**batch).loss


def evaluate(module, batch):
    """Accuracy and loss of a batch; reported as `val_acc` and `val_loss`."""
    output = module(**batch)
    return {"acc": (output.logits.argmax(dim=-1) == batch["labels"]).float().mean(), "loss": output.loss}


def build(*, lr=1e-3, width=64, depth=3, dropout=0.1, weight_decay=0.01, batch_size=32, epochs=5, seed=0):
    """Describe the training of a BERT."""
    train, validation, num_tokens = sentences.load()
    num_steps = epochs * -(-len(train) // batch_size)
    return TrainTask(
        model=partial(make, num_tokens, width, depth, dropout),
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay),
        step=step,
        train=train,
        validate=validation,
        evaluate=evaluate,
        metric="val_acc",
        epochs=epochs,
        batch_size=batch_size,
        max_grad_norm=1.0,
        scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=num_steps),
        scheduler_interval="step",
        seed=seed,
    )
