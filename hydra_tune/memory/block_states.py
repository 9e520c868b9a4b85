"""The states of a block, and the allowed changes of state.

                             taken in, or loaded while a unit waits
                     +-----------------------------------------------+
                     |                                               v
    on disk <----> on host ----> loading ----------------------> resident <----> computing
       ^             ^   ^          |                             |  |  ^
       |             |   +----------+ called off, or failed       |  |  |
       |             |                                            |  v  |
       |             +--------------------------------------------+ spilling
       +---------------- its host copy has gone before -----------+

    dropped: from every state but loading and spilling, which end first; nothing follows

"loading" and "spilling" are background copies. A copy made by the thread in need of the bytes is made under the block's lock,
and is over before another thread has the lock. A block taken over by another device is resident before and after. A resident
or computing block may also be on the host or on disk; the state names the place from which the block is used.
`Block.enter` (`block.py`) checks every change against `FOLLOWING`; the pager, the lease, the prefetcher, the host tier
and `drop` (`block_release.py`) make the changes, each under the block's lock.
"""

from collections.abc import Iterable
from enum import StrEnum

from hydra_tune.errors import BlockStateError

NUM_KEPT = 8
"""Number of past states remembered by a block."""


class BlockState(StrEnum):
    """Place of a block, and the operation in progress."""

    HOST = "on host"
    LOADING = "loading"
    RESIDENT = "resident"
    COMPUTING = "computing"
    SPILLING = "spilling"
    DISK = "on disk"
    DROPPED = "dropped"


FOLLOWING: dict[BlockState, frozenset[BlockState]] = {
    BlockState.HOST: frozenset({BlockState.LOADING, BlockState.RESIDENT, BlockState.DISK, BlockState.DROPPED}),
    BlockState.LOADING: frozenset({BlockState.RESIDENT, BlockState.HOST}),
    BlockState.RESIDENT: frozenset(
        {
            BlockState.COMPUTING,
            BlockState.SPILLING,
            BlockState.HOST,
            BlockState.DISK,
            BlockState.RESIDENT,
            BlockState.DROPPED,
        }
    ),
    BlockState.COMPUTING: frozenset({BlockState.RESIDENT, BlockState.DROPPED}),
    BlockState.SPILLING: frozenset({BlockState.RESIDENT}),
    BlockState.DISK: frozenset({BlockState.HOST, BlockState.DROPPED}),
    BlockState.DROPPED: frozenset(),
}


def impossible(
    what: str, number: int, owner: int | None, states: Iterable[BlockState], wanted: BlockState
) -> BlockStateError:
    """Return the error for a change of state that is not allowed."""
    story = list(states)
    trial_name = "no trial" if owner is None else f"trial {owner}"
    allowed = ", ".join(sorted(FOLLOWING[story[-1]])) or "nothing"
    return BlockStateError(
        f"block {number} ({what} of {trial_name}) cannot become {wanted!s}, because it is {story[-1]!s} (allowed next: "
        f"{allowed}; states so far: {' > '.join(story)}). This is a fault of hydra-tune, not of the trial: please report "
        "it with this message"
    )
