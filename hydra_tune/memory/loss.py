"""What becomes of the blocks on a device that is lost. Asks nothing of the device any more."""

from hydra_tune.memory.pager import Pager


def dirty_owners(pager: Pager) -> set[int | None]:
    """The trials of which the device has bytes that are nowhere else."""
    found: set[int | None] = set()
    for block in pager.residents():
        with block.lock:
            if pager.is_sent_off(block):
                pager.part_with_sent(block)  # it came through, or it did not
            if block.home is pager and block.leaving is not None:
                pager.finish_leaving(block)  # likewise
            if block.home is pager and block.dirty:
                found.add(block.owner)
    return found


def give_up(pager: Pager) -> None:
    """Nothing is there any more; what was there only is lost."""
    for block in pager.residents():
        with block.lock:
            if block.coming is not None and block.coming.home is pager:
                pager.discard(block)
            elif block.home is pager and not (pager.is_sent_off(block) and pager.part_with_sent(block)):
                block.dirty = False
                pager.release(block)
