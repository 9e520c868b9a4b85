"""Blocks on a lost device: finds trials with lost bytes and gives the blocks up, without asking anything of the device.

`DeviceLossHandler` (`pool/devices/device_failure.py`) calls `dirty_owners` when a worker declares its device lost, and
calls `give_up` once the affected trials have failed.

Note: order. A block given up before its trial has failed would be loaded again from the host's outdated copy. Both
functions run on the lost device's own worker, without the pool's lock, because both take the locks of blocks. The module must
not end a trial: the handler does.
"""

from hydra_tune.memory.pager import Pager


def dirty_owners(pager: Pager) -> set[int | None]:
    """Trials with bytes that only the lost device has."""
    owners: set[int | None] = set()
    for block in pager.residents():
        with block.lock:
            if pager.is_sent_off(block):
                pager.part_with_sent(block)  # a copy may have come through before the loss
            if block.home is pager and block.leaving is not None:
                pager.finish_leaving(block)  # a write-back as well
            if block.home is pager and block.dirty:
                owners.add(block.owner)
    return owners


def give_up(pager: Pager) -> None:
    """Give up all blocks on the device; bytes held only there are lost."""
    for block in pager.residents():
        with block.lock:
            if block.coming is not None and block.coming.home is pager:
                pager.discard(block)
            elif block.home is pager and not (pager.is_sent_off(block) and pager.part_with_sent(block)):
                block.dirty = False
                pager.release(block)
