"""Small stock `Trainer`s of the transformers library: models made by their settings, and data made by a generator.

Arguments have the names of the newest version; `as_installed` turns these into names of the installed version. Nothing here
knows of hydra-tune: `trained` is what a user of the library runs.
"""

from functools import partial

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

WORDS, LABELS = 60, 3
ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}


class Rows(Dataset):
    """Samples from a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return dict(self.rows[index])


def _words(generator, length):
    return torch.randint(2, WORDS, (length,), generator=generator).tolist()


def _label(words):
    return sum(words) % LABELS


def _text(generator, length):
    words = _words(generator, length)
    return {"input_ids": words, "labels": _label(words)}


def _tokens(generator, length):
    words = _words(generator, length)
    return {"input_ids": words, "labels": [word % LABELS for word in words]}


def _sentence(generator, length):
    words = _words(generator, length)
    return {"input_ids": words, "labels": list(words)}


def _choices(generator, length):
    choices = [_words(generator, 6) for _ in range(4)]
    return {"input_ids": choices, "labels": length % 4}


def _image(generator, length):
    return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": length % LABELS}


def rows(sample, count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return Rows([sample(generator, length) for length in lengths])


def padded(samples):
    """Pad words and labels to the longest sample of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def stacked(name, padding):
        rest = [[padding] * (longest - len(sample["input_ids"])) for sample in samples]
        return torch.tensor([[*sample[name], *each] for sample, each in zip(samples, rest, strict=True)])

    ids = stacked("input_ids", 0)
    has_sequences = isinstance(samples[0]["labels"], list)
    labels = stacked("labels", -100) if has_sequences else torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def masked(samples):
    """Hide words at random, with numbers from torch's own stream."""
    batch = padded(samples)
    hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["attention_mask"] == 1)
    hidden[:, 0] = True
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, 1),
        "labels": batch["labels"].masked_fill(~hidden, -100),
    }


def text_model():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER, num_labels=LABELS))


def token_model():
    return transformers.BertForTokenClassification(transformers.BertConfig(**ENCODER, num_labels=LABELS))


def masked_model():
    return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER))


class Bag(torch.nn.Module):
    """A model that is not of the library, and is given no number of labels."""

    def __init__(self):
        super().__init__()
        self.words, self.drop, self.head = (
            torch.nn.Embedding(WORDS, 16),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, LABELS),
        )
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, input_ids, attention_mask, labels=None):
        words = self.words(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.head(self.drop(self.norm(words.mean(dim=1))))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def causal_model():
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2_model():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def choice_model():
    return transformers.BertForMultipleChoice(transformers.BertConfig(**ENCODER))


def image_model():
    sizes = {name: value for name, value in ENCODER.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=LABELS)
    return transformers.ViTForImageClassification(config)


def translation_model():
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=16,
        bos_token_id=2, eos_token_id=3, pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def accuracy(predicted):
    scores = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    known = predicted.label_ids != -100
    return {
        "accuracy": (scores.argmax(-1) == predicted.label_ids)[known].mean(),
        "spread": float(scores.std()),
        "order": float(scores.flatten() @ range(scores.size)),
        "shape": float(sum(scores.shape)),
    }


def own_loss(outputs, labels, num_items_in_batch=None):
    """A loss of the user's, over all labels of a step; up to transformers 4.56 evaluations give no number of labels."""
    if num_items_in_batch is None:
        return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten())
    loss = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


def questions():
    """Arguments of a `Trainer` whose batches have no `labels`, but first and last words of answers."""

    def sample(generator, length):
        return {"input_ids": _words(generator, 8), "start_positions": length % 4, "end_positions": 4 + length % 4}

    return {
        "model_init": lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**ENCODER)),
        "train_dataset": rows(sample, 22, seed=0),
        "eval_dataset": rows(sample, 10, seed=1),
        "data_collator": transformers.default_data_collator,
        "compute_metrics": None,
    }


KINDS = {
    "text classification": (text_model, _text, padded),
    "token classification": (token_model, _tokens, padded),
    "causal language model": (causal_model, _sentence, padded),
    "GPT-2": (gpt2_model, _sentence, padded),
    "a module of one's own": (Bag, _text, padded),
    "masked language model": (masked_model, _sentence, masked),
    "multiple choice": (choice_model, _choices, None),
    "image classification": (image_model, _image, None),
    "translation": (translation_model, _sentence, padded),
}


SKIPS_REST = transformers.__version__.startswith(("4.50.", "4.51."))
"""Whether the installed `Trainer` leaves batches of a shorter last step untrained."""
FIELDS = frozenset(TrainingArguments.__dataclass_fields__)


def as_installed(arguments):
    """Return arguments of `TrainingArguments` with the names that the installed version has for them."""
    arguments = dict(arguments)
    if "train_sampling_strategy" not in FIELDS and "train_sampling_strategy" in arguments:
        strategy = arguments.pop("train_sampling_strategy")
        if strategy == "sequential":
            pytest.skip("this version has no sequential order")
        arguments["group_by_length"] = strategy == "group_by_length"
    if "activation_checkpointing" not in FIELDS and "activation_checkpointing" in arguments:
        arguments["gradient_checkpointing"] = arguments.pop("activation_checkpointing")
    if isinstance(arguments.get("warmup_steps"), float) and "past_index" in FIELDS:
        arguments["warmup_ratio"] = arguments.pop("warmup_steps")
    if SKIPS_REST and arguments.get("gradient_accumulation_steps") == 4:
        arguments["gradient_accumulation_steps"] = 3
    return arguments


def trainer(folder, kind="text classification", *, live_model=False, trainer_class=Trainer, given=None, **arguments):
    """Build a stock `Trainer`; `given` are arguments of its own, all others those of `TrainingArguments`."""
    init, sample, collate = KINDS[kind]
    defaults = {
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "logging_strategy": "no",
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
    }
    is_seq2seq = issubclass(trainer_class, transformers.Seq2SeqTrainer)
    arguments_class = transformers.Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments
    values = {
        **({"model": init()} if live_model else {"model_init": init}),
        "args": arguments_class(output_dir=str(folder), **as_installed(defaults | arguments)),
        "train_dataset": rows(sample, 22, seed=0),
        "eval_dataset": rows(sample, 10, seed=1),
        "data_collator": collate,
        "compute_metrics": accuracy,
    }
    return trainer_class(**(values | (given or {})))


def making(folder, *args, **kwargs):
    return partial(trainer, folder, *args, **kwargs)


def trained(make):
    """Run `Trainer.train()`; return the weights, the metrics of each evaluation, and the `Trainer`."""
    transformers.set_seed(42)
    stock = make()
    stock.train()
    reports = [entry for entry in stock.state.log_history if "eval_loss" in entry]
    return stock.model.state_dict(), reports, stock
