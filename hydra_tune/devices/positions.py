"""Where a generator's stream stands, from its state: how far it is from there to another position, and moving it on."""

import torch
from torch import Tensor

_BLOCK = 624  # numbers that the Mersenne Twister makes at once
_INSIDE_BLOCK = slice(512, 4608)  # bytes of a generator's state that are the block's, whatever lies around it
_MAX_DRAWS = 100_000 * _BLOCK  # looked for, in less than a second; dropout draws one or two for each element
_CHUNK = 1 << 18
_SEED, _OFFSET = 0, 1  # the numbers of 64 bits that a Philox generator's state is made of


class MersennePositions:
    """Positions of torch's generators on the host."""

    @staticmethod
    def draws_between(before: Tensor, after: Tensor) -> int | None:
        """By how many draws a stream has moved from one position to another; None if that is not found.

        The generator (a Mersenne Twister) makes its numbers in blocks, and most of its state is the block: first the block is
        found, then the place in it.
        """
        stream = torch.Generator()
        last, start = before, 0
        for count in range(0, _MAX_DRAWS, _BLOCK):
            stream.set_state(last)
            _skip(stream, _BLOCK if count else 0)
            state = stream.get_state()
            if torch.equal(state[_INSIDE_BLOCK], after[_INSIDE_BLOCK]):
                break
            last, start = state, count
        stream.set_state(last)
        for count in range(start, start + 2 * _BLOCK + 1):
            if torch.equal(stream.get_state(), after):
                return count
            _skip(stream, 1)
        return None

    @staticmethod
    def moved(state: Tensor, count: int) -> Tensor:
        """The position so many draws further on."""
        stream = torch.Generator()
        stream.set_state(state)
        _skip(stream, count)
        return stream.get_state()


class PhiloxPositions:
    """Positions of GPUs' generators, which count: each number is made from the seed and its place in the stream."""

    @staticmethod
    def draws_between(before: Tensor, after: Tensor) -> int | None:
        """By how many draws of each thread a stream has moved from one position to another; None: it was seeded anew."""
        first, second = before.clone().view(torch.int64), after.clone().view(torch.int64)
        moved = int(second[_OFFSET] - first[_OFFSET])
        return moved if first[_SEED] == second[_SEED] and moved >= 0 else None

    @staticmethod
    def moved(state: Tensor, count: int) -> Tensor:
        """The position so many draws further on."""
        moved = state.clone()
        moved.view(torch.int64)[_OFFSET] += count
        return moved


def _skip(stream: torch.Generator, count: int) -> None:
    for first in range(0, count, _CHUNK):
        torch.empty(min(_CHUNK, count - first), dtype=torch.float32).random_(generator=stream)
