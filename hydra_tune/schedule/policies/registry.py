"""The policies by name, for the executor's `policy=` and the command line.

`ExecutorSettings` (`pool/runtime/settings.py`) makes the policy when an executor is made, `simulate/engine/simulator.py`
at the start of a simulation, and `simulate/recorded/replay.py` at the start of a replay. `cli/sweep_file/sweep_model.py`
and `cli/commands/sweep.py` check a name by `check_policy_name`, and `cli/commands/simulate.py` by `make_policy`. A built-in
name goes before an installed package's. The module must not import a policy that needs torch.
"""

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.policies.fair import Fair
from hydra_tune.schedule.policies.fifo import Fifo
from hydra_tune.schedule.policies.lpt import LPT
from hydra_tune.schedule.policies.lrtf import ShardedLRTF
from hydra_tune.schedule.policies.lrtf_paper import LRTFPaper
from hydra_tune.schedule.policies.policy import IncrementalPolicy, Policy
from hydra_tune.schedule.policies.random_choice import RandomChoice
from hydra_tune.schedule.policies.round_robin import RoundRobin
from hydra_tune.schedule.policies.srtf import SRTF

POLICIES: Mapping[str, Callable[[], IncrementalPolicy]] = MappingProxyType(
    {
        "lrtf": ShardedLRTF,
        "lrtf_paper": LRTFPaper,
        "srtf": SRTF,
        "fifo": Fifo,
        "round_robin": RoundRobin,
        "fair": Fair,
        "lpt": LPT,
        "random": RandomChoice,
    }
)
"""Policy factories by name; `"lrtf"` is the default of executors and simulations."""

ENTRY_POINTS = "hydra_tune.policies"
"""Entry point group in which installed packages register policies; each entry loads a callable without arguments."""


def make_policy(policy: str | Policy) -> Policy:
    """Make a policy from its name, or accept a policy object.

    Args:
        policy: a name in `POLICIES`, the name of an entry point in the group `ENTRY_POINTS`, or any object with the
            method of `Policy`.

    Returns:
        The policy.

    Raises:
        ConfigError: an unknown name, an entry point that cannot be loaded, a class, or an object without `choose`.
    """
    if not isinstance(policy, str):
        return _checked(policy, f"policy must be one of {_quoted(list(POLICIES))} or an object")
    make = POLICIES.get(policy)
    if make is not None:
        return make()
    installed = _installed()
    if policy in installed:
        return _load(installed[policy])
    raise _unknown(policy, otherwise="or give an object with choose(device, candidates)")


def check_policy_name(name: str) -> None:
    """Refuse an unknown policy name, without running code of an installed package.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in POLICIES and name not in _installed():
        raise _unknown(name)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _unknown(policy: str, otherwise: str | None = None) -> ConfigError:
    names = [*POLICIES, *(name for name in _installed() if name not in POLICIES)]
    close = difflib.get_close_matches(policy.lower(), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else otherwise
    return ConfigError(f"policy must be one of {_quoted(names)}, not {policy!r}{f'; {hint}' if hint else ''}")


def _load(entry: EntryPoint) -> Policy:
    description = f"the entry point {entry.name!r} ({entry.value})"
    try:
        policy = entry.load()()
    # Any exception, because the code is an installed package's.
    except Exception as error:
        raise ConfigError(
            f"policy {entry.name!r}: {description} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return _checked(policy, f"{description} must make an object")


def _checked(policy: object, expected: str) -> Policy:
    # A class has `choose`, too, so the check of the protocol below would accept it.
    if isinstance(policy, type):
        raise ConfigError(f"policy must be an object, not the class {policy.__name__}; write {policy.__name__}()")
    if not isinstance(policy, Policy):
        raise ConfigError(f"{expected} with choose(device, candidates), not {policy!r}")
    return policy


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))
