"""Sentences of the standard library's docstrings, and the package each is from. Nothing is downloaded or imported."""

import ast
import random
import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

PACKAGES = ("_pydecimal", "asyncio", "email", "http", "importlib", "logging", "unittest", "xml")
"""The classes."""
LENGTH = 32
"""Tokens of a sentence; shorter ones are padded, longer ones cut."""
PAD, UNKNOWN, START = range(3)
_MOST_OF_A_PACKAGE = 432
_VALIDATION_SHARE = 5
_BATCHES_OF = 32


class Sentences(Dataset):
    """Sentences as a BERT takes them: `input_ids` and `attention_mask` of (LENGTH,), and `labels`."""

    def __init__(self, sentences, vocabulary) -> None:
        self.ids = torch.full((len(sentences), LENGTH), PAD)
        self.labels = torch.tensor([label for _, label in sentences])
        for row, (sentence, _) in zip(self.ids, sentences, strict=True):
            ids = [START] + [vocabulary.get(word, UNKNOWN) for word in sentence.split()]
            row[: len(ids)] = torch.tensor(ids[:LENGTH])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": self.labels[index]}


@cache
def load() -> tuple[Sentences, Sentences, int]:
    """Sentences for training and for validation, as many of each package, and the number of tokens there are."""
    per_package = of_packages()
    count = min(_MOST_OF_A_PACKAGE, *map(len, per_package))
    source = random.Random(0)
    labelled = [(text, label) for label, texts in enumerate(per_package) for text in source.sample(texts, count)]
    source.shuffle(labelled)
    # Whole batches: a last, smaller one would be one more kind of batch to prepare for.
    num_validation = len(labelled) // _VALIDATION_SHARE // _BATCHES_OF * _BATCHES_OF
    num_train = (len(labelled) - num_validation) // _BATCHES_OF * _BATCHES_OF
    train, validation = labelled[:num_train], labelled[len(labelled) - num_validation :]
    counts = Counter(word for text, _ in train for word in text.split())
    words = [word for word, times in counts.most_common() if times > 1]
    vocabulary = {word: number for number, word in enumerate(words, START + 1)}
    return Sentences(train, vocabulary), Sentences(validation, vocabulary), START + 1 + len(words)


def of_packages() -> list[list[str]]:
    """For each package its sentences in lower-case words; one that two packages have is left out."""
    found = [list(dict.fromkeys(of_package(package))) for package in PACKAGES]
    counts = Counter(sentence for sentences in found for sentence in sentences)
    return [[sentence for sentence in sentences if counts[sentence] == 1] for sentences in found]


def of_package(package: str):
    """The sentences of a package's or a module's docstrings, in lower-case words, without examples of code."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((root / package).rglob("*.py")) or [root / f"{package}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from split(ast.get_docstring(node) or "")


def split(docstring: str):
    """The sentences of a docstring that have four words or more."""
    prose = "\n".join(line for line in docstring.splitlines() if not line.lstrip().startswith((">>>", "...")))
    for sentence in re.split(r"(?<=[.!?:])\s+|\n\s*\n", prose):
        words = re.findall(r"[a-z]+", sentence.lower())
        if len(words) >= 4:
            yield " ".join(words)
