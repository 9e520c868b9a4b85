"""Pickles the objects sent to pools, and names the culprit where pickling fails.

`trainable` (`trainable.py`) pickles `build` before its trials start, and `start_pools` (`pools.py`) tries each option of
the executor. `NodePoolRuntime` (`node/pool_runtime.py`) unpickles `build` for each trial.
"""

import io
from typing import Any

import ray.cloudpickle
from ray.util import inspect_serializability

from hydra_tune_ray.errors import BuildPickleError


def pickled(value: Any, what: str) -> bytes:
    """Pickle an object for a pool; messages call the object `what`.

    Raises:
        BuildPickleError: the object cannot be pickled; the message names the part to blame.
    """
    try:
        data = ray.cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise BuildPickleError(
            f"{what} cannot be pickled, and so not be sent to a pool: {_blamed(value)} ({type(error).__name__}: {error}); "
            f"have {what} make it when it is called, or take it from a module"
        ) from error
    assert isinstance(data, bytes)
    return data


def _blamed(value: Any) -> str:
    """Describe the innermost objects that do not pickle."""
    # Into a buffer, because Ray prints a tree of its findings.
    _, failures = inspect_serializability(value, depth=4, print_file=io.StringIO())
    culprits = [_place(failure) for failure in failures if failure.obj is not value]
    return "because of " + "; ".join(sorted(culprits)) if culprits else f"because of {_kind(value)}"


def _place(failure: Any) -> str:
    path = getattr(failure, "path", None) or (failure.name,)  # the attribute depends on Ray's version
    return f"{path[-1]!r}, {_kind(failure.obj)}, in {_named(failure.parent)}"


def _kind(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _named(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or _kind(value))
