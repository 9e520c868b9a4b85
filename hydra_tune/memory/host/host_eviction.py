"""Entries of the host tier: knowledge about each host copy, and the rules for the copies that may go and go first.

`HostTier` (`host_tier.py`) keeps an entry for each block that has been on its ledger, and applies the rules whenever a host
copy has to make room.

Note: locks. The rules read blocks without their locks, so the tier asks again whether a copy may go once the tier has the
block's lock. The rules must change nothing, and must not copy to devices.
"""

from dataclasses import dataclass

from hydra_tune.memory.block import Block
from hydra_tune.memory.reuse_distance import AHEAD, BlockUseHistory


@dataclass(slots=True)
class HostTierEntry:
    """Knowledge of the host tier about a block.

    Attributes:
        is_stored: whether the file has the bytes of the host copy, or had the bytes when the copy was given up.
        holds: number of callers that hold the copy on the host.
    """

    block: Block
    uses: BlockUseHistory
    on_host: bool = False
    is_stored: bool = False
    is_refused: bool = False
    holds: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether only the file has the block's bytes."""
        return self.is_stored and not self.on_host and self.block.host is None and self.block.data is None

    @property
    def is_wanted(self) -> bool:
        """Whether the block's trial has not failed, as far as known here."""
        return self.block.tenant is None or self.block.tenant.failure is None


def worth(entry: HostTierEntry, now: int) -> tuple[bool, bool, int, int]:
    """Sort key for giving copies up, lowest first.

    A failed trial's copies go first. Of the rest, a copy refused by the disk is tried last. Otherwise a copy with a duplicate
    on a device comes first, because giving the copy up costs nothing, and a copy in transit last. Among equals, the copy with
    the farthest next use comes first.
    """
    rank = 0 if is_on_device(entry.block) else 2 if is_moving(entry.block) else 1
    # False sorts before True: copies of failed trials first, and in either class refused copies last.
    return entry.is_wanted, entry.is_refused, rank, -entry.uses.distance(now)


def is_on_device(block: Block) -> bool:
    """Whether a device has the same bytes and is not writing the bytes to the host at the moment."""
    coming = block.coming
    if coming is not None:
        return coming.copy.is_over
    return block.data is not None and block.leaving is None


def is_moving(block: Block) -> bool:
    """Whether a background copy reads or writes the host copy, or has ended without a thread having noticed."""
    return block.leaving is not None or block.coming is not None


def may_always(entry: HostTierEntry, now: int) -> bool:
    """Rule for a waiting unit: any copy may go."""
    del entry, now
    return True


def is_far(entry: HostTierEntry, now: int) -> bool:
    """Rule for work ahead: a copy may go if a device has the bytes, or if the next use is far and no background copy moves.

    A copy that the disk has refused may not go.
    """
    if entry.is_refused:
        return False
    return is_on_device(entry.block) or (not is_moving(entry.block) and entry.uses.distance(now) > AHEAD)


def costs_nothing(entry: HostTierEntry, now: int) -> bool:
    """Rule for callers that must not wait for the disk: as `is_far`, but only with the bytes in the file or on a device."""
    return is_far(entry, now) and (entry.is_stored or is_on_device(entry.block))
