"""Whether those who talk to each other were installed from the same hydra-tune: asked before anything else is said.

What they say are pickled values of this package, which another version cannot read. The version itself is a text. Detached
pools may be older than a driver, and the nodes of a cluster may differ.
"""

from typing import Any

import ray

from hydra_tune import __version__
from hydra_tune_ray.errors import PoolError

PROTOCOL = 1
"""Goes up with each change of `messages.py`, and of the methods of the directory and of pools."""

VERSION = f"hydra-tune {__version__} (protocol {PROTOCOL})"

_ANSWER_SECONDS = 60.0
_EARLIER = "an earlier hydra-tune"


def check_directory(directory: Any, pools: str) -> None:
    """Refuse pools of another version.

    Args:
        directory: their actor.
        pools: their name.

    Raises:
        PoolError: they are of another version.
        RayError: there is no answer.
    """
    asked = getattr(directory, "version", None)  # the first versions do not tell
    found = _EARLIER if asked is None else str(ray.get(asked.remote(), timeout=_ANSWER_SECONDS))
    if found != VERSION:
        raise PoolError(
            f"the pools {pools!r} run {found}, and this program {VERSION}; install the same hydra-tune here as on the nodes, "
            f"or end these pools, ray.kill(ray.get_actor('pools-{pools}', namespace='hydra_tune')), and start new ones"
        )


def wrong_pool(found: str | None, node_id: str) -> str:
    """What is wrong with a pool's version, or nothing.

    Args:
        found: what it says; None: it cannot.
        node_id: where it is.
    """
    if found == VERSION:
        return ""
    return (
        f"the pool on node {node_id[:8]} runs {found or _EARLIER}, and its directory {VERSION}; "
        "install the same hydra-tune on all nodes"
    )
