"""WikiText as masked sequences: words of a text file, their vocabulary, and BERT's masking."""

from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

PADDING, UNKNOWN, START, MASK = range(4)
SPECIAL = 4
IGNORED = -100
"""The label of a place whose word is not asked for; what `cross_entropy` leaves out."""

_ASKED = 0.15  # of all places
_MASKED, _REPLACED = 0.8, 0.1  # of those
_HELD_OUT = 0.1  # of a single file


class MaskedText(Dataset):
    """Sequences of words, in each of which 15% are to be told from the others.

    A sample is (words, labels), both (tokens,) int64. Of the words that are asked for, 8 in 10 are masked, 1 is another word
    and 1 is left, as in BERT; they are drawn from the trial's own random stream each time.

    Args:
        words: (sequences, tokens - 1) int32; a start token is put before each.
        vocabulary: words that there are, special ones included.
    """

    def __init__(self, words, vocabulary: int) -> None:
        self.words, self.vocabulary = words, vocabulary

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int):
        words = torch.cat([torch.tensor([START]), self.words[index].long()])
        asked = torch.rand(len(words)) < _ASKED
        asked[0] = False
        labels = torch.where(asked, words, IGNORED)
        fate = torch.rand(len(words))
        others = torch.randint(SPECIAL, self.vocabulary, words.shape)
        words = torch.where(asked & (fate < _MASKED), MASK, words)
        return torch.where(asked & (fate >= _MASKED) & (fate < _MASKED + _REPLACED), others, words), labels


@cache
def read(data: str, vocabulary: int, tokens: int) -> tuple[MaskedText, MaskedText]:
    """Text as (training, validation).

    Args:
        data: a text file, of which the last tenth is for validation; or a folder with one file `*.train.*` and one `*.valid.*`,
            as WikiText-2 comes.
        vocabulary: the most frequent words of the training text, less the special ones; all others are unknown.
        tokens: of a sequence, with the start token.
    """
    path = Path(data)
    if path.is_dir():
        train, validation = (_words(_only(path, part)) for part in ("train", "valid"))
    else:
        words = _words(path)
        held_out = max(tokens - 1, int(len(words) * _HELD_OUT))
        train, validation = words[:-held_out], words[-held_out:]
    frequent = Counter(train).most_common(vocabulary - SPECIAL)
    numbers = {word: SPECIAL + number for number, (word, _) in enumerate(frequent)}
    numbers["<unk>"] = UNKNOWN  # as WikiText writes it
    return tuple(MaskedText(_sequences(words, numbers, tokens, path), vocabulary) for words in (train, validation))


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split()


def _only(folder: Path, part: str) -> Path:
    found = sorted(folder.glob(f"*.{part}.*"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} must have one file *.{part}.*, such as wiki.{part}.tokens, not {len(found)}")
    return found[0]


def _sequences(words: list[str], numbers: dict[str, int], tokens: int, path: Path):
    each = tokens - 1
    count = len(words) // each
    if not count:
        raise ValueError(f"{path} has {len(words)} words for training or validation, and a sequence takes {each}")
    known = [numbers.get(word, UNKNOWN) for word in words[: count * each]]
    return torch.tensor(known, dtype=torch.int32).reshape(count, each)
