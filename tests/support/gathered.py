"""Groups that are closed by who has been submitted, and not by how long ago."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from hydra_tune.pool.fusion.group_matcher import GroupMatcher
from tests.unit.pool.tasks import PATIENCE_SECONDS


def gather(monkeypatch: pytest.MonkeyPatch, are_there: Callable[[int], bool]) -> None:
    """Have no group take members before `are_there(how many trials have been submitted to all pools since)`."""
    times: list[float] = []
    take = GroupMatcher._take

    def note(finder: GroupMatcher, seconds: float) -> None:
        finder.__dict__["last_submitted"] = seconds
        if seconds:  # not its beginning
            times.append(seconds)

    def waiting(finder: GroupMatcher, *arguments: Any) -> Any:
        end = time.monotonic() + PATIENCE_SECONDS
        while not are_there(len(times)):
            assert time.monotonic() < end, f"{len(times)} trials have been submitted"
            time.sleep(0.002)
        return take(finder, *arguments)

    seen = property(lambda finder: finder.__dict__["last_submitted"], note)
    monkeypatch.setattr(GroupMatcher, "last_submitted", seen, raising=False)
    monkeypatch.setattr(GroupMatcher, "_take", waiting)
