"""Version check between driver, directory and pools, before any other message.

Messages are pickled values of this package, unreadable for another version; the version itself is plain text. Detached pools
may be older than a driver, and the nodes of a cluster may differ. `start_pools` and a `Pools` that looks for its directory by
name (`pools.py`) check the directory before any other call, and `TrialClient` (`client.py`) before the directory chooses a
pool. `PoolDirectory` (`node/pool_directory.py`) checks each pool before the pool opens. `PoolActor` (`node/actors.py`) and
`PoolDirectory` answer with `VERSION`.

Note: the method `version` of directory and pools must keep its name and its plain text in all versions.
"""

from typing import Any

import ray

from hydra_tune import __version__
from hydra_tune_ray.errors import PoolError

PROTOCOL = 2
"""Protocol version; increases with each change of `messages.py` and of the methods of the directory and of pools."""

VERSION = f"hydra-tune {__version__} (protocol {PROTOCOL})"

_ANSWER_SECONDS = 60.0
_EARLIER = "an earlier hydra-tune"


def check_directory(directory: Any, pools: str) -> None:
    """Refuse pools of another version, by the actor of their directory.

    Raises:
        PoolError: the pools run another version.
        RayError: the directory does not answer.
    """
    version_method = getattr(directory, "version", None)  # absent in the first versions
    running = _EARLIER if version_method is None else str(ray.get(version_method.remote(), timeout=_ANSWER_SECONDS))
    if running != VERSION:
        raise PoolError(
            f"the pools {pools!r} run {running}, and this program {VERSION}; install the same hydra-tune here as on the nodes, "
            f"or end these pools, ray.kill(ray.get_actor('pools-{pools}', namespace='hydra_tune')), and start new ones"
        )


def wrong_pool(found: str | None, node_id: str) -> str:
    """Return the error in a pool's version, or an empty text; without a version, the pool is too old to answer."""
    if found == VERSION:
        return ""
    return (
        f"the pool on node {node_id[:8]} runs {found or _EARLIER}, and its directory {VERSION}; "
        "install the same hydra-tune on all nodes"
    )
