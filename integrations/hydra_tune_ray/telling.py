"""A pool's way to its directory: what it says there every half a second, and when it takes the directory for gone.

Whoever takes it for gone ends all of its trials, so nothing that passes does: a machine that is overloaded or was stopped, a
directory that Ray starts again elsewhere, a cluster that answers late or wrongly once.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, RayError

from hydra_tune_ray.actors import GONE_TIMES, find_actor
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import Load

_ANSWER_SECONDS = 10.0
_LOST_SECONDS = 120.0


class Telling:
    """See the module.

    Args:
        pool: its name.
        directory: the name of its directory.
    """

    def __init__(self, pool: str, directory: str) -> None:
        self._pool = pool
        self._name = directory
        self._own = ray.get_runtime_context().current_actor
        self._directory: Any = None
        self._silence = Silence(_LOST_SECONDS, 2 * _ANSWER_SECONDS)
        self._num_missing = 0

    async def tell(self, load: Load) -> Mapping[str, str]:
        """Say what there is to do.

        Returns:
            Trials that are to leave, by key: the name of the pool that they go to. Nothing if there is no answer.

        Raises:
            PoolError: the directory is gone, or has not answered for long.
        """
        try:
            actor = await self._found()
            # The directory is given the actor, not left to ask Ray for it.
            moves = await asyncio.wait_for(actor.pulse.remote(self._pool, load, self._own), _ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            if isinstance(error, ActorDiedError):
                self._directory = None  # there may be another one of this name
            if self._silence.lasts():
                raise PoolError(f"its directory has not answered for {_LOST_SECONDS:g} s: {error!r}") from error
            return {}
        self._silence.ends()
        return cast("Mapping[str, str]", moves)

    async def _found(self) -> Any:
        """The directory; not in the event loop, for Ray may not answer."""
        if self._directory is None:
            try:
                found = asyncio.to_thread(find_actor, self._name)
                self._directory = await asyncio.wait_for(found, _ANSWER_SECONDS)
            except ValueError as error:
                self._num_missing += 1
                if self._num_missing < GONE_TIMES:
                    raise TimeoutError(f"there is no directory {self._name!r} now") from error
                raise PoolError(f"its directory is gone: {error}") from error
        self._num_missing = 0
        return self._directory


class Silence:
    """How long there has been no answer.

    Args:
        limit: seconds that it may last.
        each: what counts at most of the time between two tries. Longer is only a process that did not run, because its
            machine was suspended or had no time for it; it could not have heard an answer either.
    """

    def __init__(self, limit: float, each: float) -> None:
        self._limit = limit
        self._each = each
        self._seconds = 0.0
        self._last = time.monotonic()

    def ends(self) -> None:
        """There was an answer."""
        self._seconds, self._last = 0.0, time.monotonic()

    def lasts(self) -> bool:
        """There was none; returns whether it lasts longer than it may."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._each)
        self._last = now
        return self._seconds > self._limit
