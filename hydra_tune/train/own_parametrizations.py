"""The cache of `torch.nn.utils.parametrize.cached`, for each thread; torch has one for all threads.

`cached` counts the regions of all threads, and empties the cache where the count is 0. With trials on several devices, a step
would find weights of its own trial's last step, or of a region that another trial has not left. `Trial` (`trial.py`) calls
`part_caches`.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any, Self

from torch.nn.utils import parametrize


class _RegionsOfThread(threading.local):
    """In the place of the count `_cache_enabled`: how many regions the thread is in."""

    def __init__(self) -> None:
        self.count = 0
        self.weights: dict[tuple[int, str], Any] = {}
        self.is_left = False

    def __iadd__(self, number: int) -> Self:
        self.count += number
        return self

    def __isub__(self, number: int) -> Self:
        self.count -= number
        if not self.count:
            self.weights = {}
            self.is_left = True
        return self

    def __bool__(self) -> bool:
        # At the end of a region `cached` asks once, and would put a dict of all threads in the place of the cache.
        is_left, self.is_left = self.is_left, False
        return is_left or self.count > 0


class _CacheOfThread:
    """In the place of the dict `_cache`."""

    def get(self, key: tuple[int, str]) -> Any:
        return _REGIONS.weights.get(key)

    def __setitem__(self, key: tuple[int, str], weight: Any) -> None:
        _REGIONS.weights[key] = weight


_REGIONS = _RegionsOfThread()


_CACHED = parametrize.cached


def part_caches() -> None:
    """Give each thread a cache of its own from the first region on: torch.compile refuses models with such a cache.

    A `cached` that the user's code has imported by name before stays torch's own.
    """
    parametrize.cached = _cached  # type: ignore[assignment]


def _cached() -> AbstractContextManager[None]:
    """In the place of `torch.nn.utils.parametrize.cached`."""
    # Not while a thread is in a region of the one cache.
    if type(parametrize._cache_enabled) is int and not parametrize._cache_enabled:  # noqa: SLF001 - no public name
        parametrize._cache_enabled, parametrize._cache = _REGIONS, _CacheOfThread()  # type: ignore[assignment]  # noqa: SLF001
    return _CACHED()
