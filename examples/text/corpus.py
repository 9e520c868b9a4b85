"""Text for language models: where it comes from, how it becomes tokens, and what an epoch is.

Plain PyTorch. Without a file the text is Python's own reference documentation, which every CPython has, so that nothing
is downloaded.
"""

import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import IterableDataset, TensorDataset

MASK = 256
"""The token of what is hidden; those below it are the bytes, those above it words."""
IGNORED = -100
"""The target of a position that does not count, as `cross_entropy` has it."""
_PIECES = re.compile(r" ?\w+|\s{1,16}| ?[^\w\s]{1,16}")
_VALIDATION_WINDOWS = 192


class Corpus:
    """A text as tokens, its last tenth kept for validation.

    A frequent word is one token, any other is spelled in bytes: every text can be written so, and read back exactly.

    Args:
        text: all of it.
        words: the most frequent ones of the training text that are tokens; with 0 a token is a byte.
    """

    def __init__(self, text: str, words: int) -> None:
        split = len(text) * 9 // 10
        frequent = Counter(_PIECES.findall(text[:split])).most_common(words)
        self.vocabulary = MASK + 1 + words
        self._ids = {word: MASK + 1 + rank for rank, (word, _) in enumerate(frequent)}
        self._bytes = [bytes([byte]) for byte in range(256)] + [b""] + [word.encode() for word, _ in frequent]
        self.train = self.encode(text[:split])
        self.validation = self.encode(text[split:])

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of a text, (n,)."""
        tokens: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._ids.get(piece)
            tokens += piece.encode() if known is None else [known]
        return torch.tensor(tokens, dtype=torch.long)

    def decode(self, tokens: torch.Tensor) -> str:
        """The text of tokens; bytes that are no text by themselves come out as a question mark."""
        return self.raw(tokens).decode(errors="replace")

    def raw(self, tokens: torch.Tensor) -> bytes:
        """The bytes that tokens stand for."""
        return b"".join(self._bytes[token] for token in tokens.tolist())


@cache
def load(file: str | None, words: int) -> Corpus:
    """The corpus of a text file in UTF-8, or of Python's documentation."""
    return Corpus(documentation() if file is None else read(Path(file)), words)


def documentation() -> str:
    """Python's reference documentation, topics in random order; they quote one another, so a paragraph is taken once."""
    order = random.Random(0).sample(sorted(topics), len(topics))
    paragraphs = dict.fromkeys(paragraph for topic in order for paragraph in topics[topic].split("\n\n"))
    return "\n\n".join(paragraphs)


def read(file: Path) -> str:
    """The text of a file."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(
            f"data: {file} {what} (seen from {Path.cwd()}); give a text file, or none for Python's own docs"
        )
    raw = file.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {file} is not text in UTF-8 (byte {error.start}); convert it, e.g. iconv -f latin1 -t utf-8 {file}"
        ) from None
    if "\0" in text:
        raise ValueError(f"data: {file} holds zero bytes, as binary files do; give a text file")
    if not text.strip():
        raise ValueError(f"data: {file} is empty; give a text file with some words, some hundred thousand if possible")
    return text


class Windows(IterableDataset):
    """Training windows at random places, others in each epoch, the same for every trial of one seed.

    Args:
        tokens: the training text, (n,).
        context: tokens of a window.
        count: windows of an epoch.
        example: makes input and target of a window of context + 1 tokens: `next_token` or `hidden`.
        seed: of places and masks.
    """

    def __init__(self, tokens, context: int, count: int, example, seed: int) -> None:
        self.tokens, self.context, self.count = tokens, context, count
        self.example, self.seed = example, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        self.epoch += 1
        starts = torch.randint(len(self.tokens) - self.context, (self.count,), generator=generator)
        for start in starts.tolist():
            yield self.example(self.tokens[start : start + self.context + 1], generator)


def next_token(window: torch.Tensor, _generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """GPT's input and target, (context,) each."""
    return window[:-1], window[1:]


def hidden(window: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's: of 100 tokens 15 are to be found; of these 8 in 10 are hidden, 1 in 10 is replaced, 1 in 10 stays."""
    tokens = window[:-1]
    chosen = torch.randperm(len(tokens), generator=generator)[: max(1, round(0.15 * len(tokens)))]
    fate = torch.rand(len(chosen), generator=generator)
    other = tokens[torch.randint(len(tokens), (len(chosen),), generator=generator)]
    targets = torch.full_like(tokens, IGNORED)
    targets[chosen] = tokens[chosen]
    shown = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, other, tokens[chosen]))
    return tokens.index_put((chosen,), shown), targets


def held_out(corpus: Corpus, context: int, example) -> tuple[TensorDataset, float]:
    """Validation windows side by side, spread over the text, the same for all trials; and bytes of one target token."""
    tokens = corpus.validation
    places = range(0, len(tokens) - context, context)
    starts = places[:: max(1, len(places) // _VALIDATION_WINDOWS)][:_VALIDATION_WINDOWS]
    windows = torch.stack([tokens[start : start + context + 1] for start in starts])
    generator = torch.Generator().manual_seed(0)
    inputs, targets = zip(*[example(window, generator) for window in windows], strict=True)
    num_bytes = sum(len(corpus.raw(window[1:])) for window in windows)
    return TensorDataset(torch.stack(inputs), torch.stack(targets)), num_bytes / (context * len(windows))
