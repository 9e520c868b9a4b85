"""Trials that are submitted one after the other and found together, however long their driver takes for it.

A pool that fuses takes for a group what is there when it looks, shortly after the last submission. A driver that the machine
holds up between two submissions has smaller groups: with the same numbers up to rounding, and of other sizes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher

PATIENCE_SECONDS = 60.0


@contextmanager
def together() -> Iterator[None]:
    """What is submitted to fusing pools in the block is neither prepared nor taken by a group before its end."""
    are_there, make, look = threading.Event(), GroupJobLauncher.make, GroupJobLauncher._look

    def made_then(*given: Any, **named: Any) -> Any:
        assert are_there.wait(PATIENCE_SECONDS)
        return make(*given, **named)

    def looked_then(carriers: GroupJobLauncher) -> None:
        assert are_there.wait(PATIENCE_SECONDS)
        look(carriers)

    with mock.patch.multiple(GroupJobLauncher, make=made_then, _look=looked_then):
        try:
            yield
        finally:
            are_there.set()
