"""What the host tier knows of each host copy, and which of them may go, and first."""

from dataclasses import dataclass

from hydra_tune.memory.block import Block
from hydra_tune.memory.uses import AHEAD, Uses


@dataclass(slots=True)
class Entry:
    """What is known of one block.

    Attributes:
        uses: when it was used.
        on_host: its copy is on the ledger.
        is_stored: its file has the host copy's bytes, or had them when it was given up.
        is_refused: the disk has not taken it.
        holds: by how many it is held on the host.
    """

    block: Block
    uses: Uses
    on_host: bool = False
    is_stored: bool = False
    is_refused: bool = False
    holds: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether its bytes are there only."""
        return self.is_stored and not self.on_host and self.block.host is None and self.block.data is None

    @property
    def is_wanted(self) -> bool:
        """Whether its trial goes on, as far as is known here."""
        return self.block.tenant is None or self.block.tenant.failure is None


def worth(entry: Entry, now: int) -> tuple[bool, bool, int, int]:
    """The lowest goes first: a copy of what a device has costs nothing to give up; one the disk has refused is tried last."""
    rank = 0 if is_on_device(entry.block) else 2 if is_moving(entry.block) else 1
    return entry.is_wanted, entry.is_refused, rank, -entry.uses.distance(now)


def is_on_device(block: Block) -> bool:
    """Whether a device has the same bytes, and is not just giving them to the host."""
    coming = block.coming
    if coming is not None:
        return coming.copy.is_over
    return block.data is not None and block.leaving is None


def is_moving(block: Block) -> bool:
    """Whether a copy in the background reads the host copy or writes to it, or nobody has seen yet that it is over."""
    return block.leaving is not None or block.coming is not None


def may_always(entry: Entry, now: int) -> bool:
    """For a unit that waits."""
    del entry, now
    return True


def is_far(entry: Entry, now: int) -> bool:
    """For what is done ahead: nothing that is needed as soon has to go for it, and no write-back is made in vain."""
    if entry.is_refused:
        return False
    return is_on_device(entry.block) or (not is_moving(entry.block) and entry.uses.distance(now) > AHEAD)


def costs_nothing(entry: Entry, now: int) -> bool:
    """For what must not wait for the disk."""
    return is_far(entry, now) and (entry.is_stored or is_on_device(entry.block))
