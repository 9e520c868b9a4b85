"""A pool's connection to its directory: reports the pool's load, and decides when the directory is gone.

A pool without a directory ends all of its trials, so a passing fault must not count as the end: an overloaded or suspended
machine, a directory that Ray restarts elsewhere, a cluster that once answers late or wrongly. `NodePool` (`node_pool.py`)
calls `tell` for each report, and ends when `tell` raises a `PoolError`. The directory's answer names the trials that should
move to other pools.

Note: threads. One report is under way at a time, on the event loop of the pool's process. Only the lookup of the directory
runs on another thread, because Ray may block there.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, RayError

from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import PoolLoadReport
from hydra_tune_ray.node.actors import GONE_TIMES, find_actor

_ANSWER_SECONDS = 10.0
_LOST_SECONDS = 120.0


class DirectoryConnection:
    """See the module's docstring; `pool` and `directory` are names."""

    def __init__(self, pool: str, directory: str) -> None:
        self._pool = pool
        self._name = directory
        self._own = ray.get_runtime_context().current_actor
        self._directory: Any = None
        self._silence = SilenceTimer(_LOST_SECONDS, 2 * _ANSWER_SECONDS)
        self._num_missing = 0

    async def tell(self, load: PoolLoadReport) -> Mapping[str, str]:
        """Report the pool's load.

        Returns:
            Trials that should move, by key: the name of the target pool. Empty without an answer.

        Raises:
            PoolError: the directory is gone, or has not answered for `_LOST_SECONDS`.
        """
        try:
            actor = await self._found()
            # Pass the actor along: a lookup by the directory would cost a call to Ray for every heartbeat.
            moves = await asyncio.wait_for(actor.pulse.remote(self._pool, load, self._own), _ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            if isinstance(error, ActorDiedError):
                self._directory = None  # Ray may have made another directory of this name
            if self._silence.lasts():
                raise PoolError(f"its directory has not answered for {_LOST_SECONDS:g} s: {error!r}") from error
            return {}
        self._silence.ends()
        return cast("Mapping[str, str]", moves)

    async def _found(self) -> Any:
        """Find the directory; in a thread, because the lookup blocks when Ray does not answer."""
        if self._directory is None:
            try:
                lookup = asyncio.to_thread(find_actor, self._name)
                self._directory = await asyncio.wait_for(lookup, _ANSWER_SECONDS)
            except ValueError as error:
                self._num_missing += 1
                if self._num_missing < GONE_TIMES:
                    raise TimeoutError(f"there is no directory {self._name!r} now") from error
                # Only after several such answers in a row, because Ray also answers so when unsure.
                raise PoolError(f"its directory is gone: {error}") from error
        self._num_missing = 0
        return self._directory


class SilenceTimer:
    """Total time without an answer.

    Args:
        limit: seconds that the silence may last.
        each: cap, in seconds, on the time counted between two tries: in a longer gap this process did not run, because its
            machine was suspended or overloaded.
    """

    def __init__(self, limit: float, each: float) -> None:
        self._limit = limit
        self._each = each
        self._seconds = 0.0
        self._last = time.monotonic()

    def ends(self) -> None:
        """Note an answer."""
        self._seconds, self._last = 0.0, time.monotonic()

    def lasts(self) -> bool:
        """Note a missing answer; return whether the silence exceeds the limit."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._each)
        self._last = now
        return self._seconds > self._limit
