"""Positions in a generator's stream: the distance between two states, and advancing a state.

`SingleTrial` (`train/single_trial.py`) counts the draws of the first batch of a plan, where batches of a step may run
together. `RandomStreams.skip` (`train/rng/rng_streams.py`), called by `OptimizerStep` (`train/loop/optimizer_step.py`), then
advances the stream past a batch that is drawn ahead. The generators of `cpu.py` and `cuda.py` derive from the two classes.
The module must not know blocks, models or trials, and leaves the states that come in unchanged. No function takes a lock or
draws from a generator that others use.

Note: bits. A wrong count would move all later draws of a trial, so `draws_between` returns None where in doubt.
"""

import torch
from torch import Tensor

_BLOCK = 624  # numbers per block of the Mersenne Twister
_INSIDE_BLOCK = slice(512, 4608)  # bytes of the generator's state that belong to the block alone
_MAX_DRAWS = 100_000 * _BLOCK  # longest search, of seconds; dropout draws one or two per element
_CHUNK = 1 << 18
_SEED, _OFFSET = 0, 1  # indices of the 64-bit numbers in a Philox generator's state


class MersennePositions:
    """Positions of torch's generators on the host."""

    @staticmethod
    def draws_between(before: Tensor, after: Tensor) -> int | None:
        """Return the number of draws between two positions of a stream; None if not found.

        The generator (a Mersenne Twister) makes numbers in blocks, and most of its state is the block. The search finds
        the block first, then the position in the block.
        """
        stream = torch.Generator()
        last, start = before, 0
        for count in range(0, _MAX_DRAWS, _BLOCK):
            stream.set_state(last)
            # The first round skips nothing: all draws may lie within the block of `before`.
            _skip(stream, _BLOCK if count else 0)
            state = stream.get_state()
            if torch.equal(state[_INSIDE_BLOCK], after[_INSIDE_BLOCK]):
                break
            last, start = state, count
        stream.set_state(last)
        # `last` lies in the block before, so the position is at most two blocks further on.
        for count in range(start, start + 2 * _BLOCK + 1):
            if torch.equal(stream.get_state(), after):
                return count
            _skip(stream, 1)
        return None

    @staticmethod
    def moved(state: Tensor, count: int) -> Tensor:
        """As of `CountingGenerator`."""
        stream = torch.Generator()
        stream.set_state(state)
        _skip(stream, count)
        return stream.get_state()


class PhiloxPositions:
    """Positions of GPU generators, which count: a number depends on the seed and the position in the stream."""

    @staticmethod
    def draws_between(before: Tensor, after: Tensor) -> int | None:
        """Return the number of draws of each thread between two positions; None after another seed, or a step back."""
        first, second = before.clone().view(torch.int64), after.clone().view(torch.int64)
        moved = int(second[_OFFSET] - first[_OFFSET])
        return moved if first[_SEED] == second[_SEED] and moved >= 0 else None

    @staticmethod
    def moved(state: Tensor, count: int) -> Tensor:
        """As of `CountingGenerator`."""
        moved = state.clone()
        moved.view(torch.int64)[_OFFSET] += count
        return moved


def _skip(stream: torch.Generator, count: int) -> None:
    for first in range(0, count, _CHUNK):
        # A float32 element takes exactly one number of the generator; chunks bound the memory.
        torch.empty(min(_CHUNK, count - first), dtype=torch.float32).random_(generator=stream)
