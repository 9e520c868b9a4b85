"""The policies by name, for the executor's `policy=` and the command line."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.fifo import Fifo
from hydra_tune.schedule.lrtf import ShardedLRTF
from hydra_tune.schedule.policy import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({"lrtf": ShardedLRTF, "fifo": Fifo})
"""Name to a callable that makes one; `"lrtf"` is the default everywhere."""


def make_policy(policy: str | Policy) -> Policy:
    """Make a policy from its name, or take one that is made already.

    Args:
        policy: a name in `POLICIES`, or any object with the method of `Policy`.

    Returns:
        The policy.

    Raises:
        ConfigError: an unknown name, or an object without `choose`.
    """
    if isinstance(policy, str):
        make = POLICIES.get(policy)
        if make is None:
            close = difflib.get_close_matches(policy.lower(), POLICIES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "or give an object with choose(device, candidates)"
            raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}, not {policy!r}; {hint}")
        return make()
    if isinstance(policy, type):
        raise ConfigError(f"policy must be an object, not the class {policy.__name__}; write {policy.__name__}()")
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy must be one of {', '.join(map(repr, POLICIES))} or an object with choose(device, candidates), "
            f"not {policy!r}"
        )
    return policy
