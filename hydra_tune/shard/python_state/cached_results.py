"""`NotedCache`: the results that a function keeps in a cache, which a step that was only tried must not leave there.

`ReachableValues` (`reachable_values.py`) makes a `NotedCache` of each cached function whose results so far are plain values or
tensors, and reads the results by `results_of`. In `state_guard.py`, `PythonStateUndo` calls `undo`, and the other guards
call `restore`. The module takes no lock: other trials may use the cache meanwhile, and compute forgotten results again.
"""

import gc
import inspect
from typing import Any

from torch import Tensor

from hydra_tune.shard.python_state.tensor_contents import MAX_DATA_BYTES
from hydra_tune.shard.python_state.value_holder import MAX_LABELS, PLAIN, Undo


class NotedCache:
    """A function with a cache, and the results that the cache has kept so far.

    Args:
        wrapper: the function, as of `functools.cache`.
    """

    __slots__ = ("_misses", "_tables", "_wrapper", "label")

    def __init__(self, wrapper: Any) -> None:
        self.label = f"the cache of {wrapper.__qualname__}"
        self._wrapper, self._misses = wrapper, wrapper.cache_info().misses
        self._tables = [(table, dict(table)) for table in _tables_of(wrapper)]

    def restore(self) -> None:
        """Forget results computed since, also by others; of a limited cache, whose results cannot be read, all results."""
        if self._wrapper.cache_info().misses == self._misses:
            return
        self._wrapper.cache_clear()
        for table, results in self._tables:
            table.update(results)
        self._misses = 0

    def undo(self) -> Undo | None:
        """Return a function that forgets the small results computed by now; None if there are none.

        Large results and objects stay: they are loaded data, which trials may share, and may have taken long to compute.
        """
        computed = [
            (table, key, result)
            for table, results in self._tables
            for key, result in list(table.items())
            if key not in results and _is_small_result(result)
        ]

        def forget() -> bool:
            for table, key, result in computed:
                if table.get(key) is result:
                    table.pop(key, None)
            return True

        return forget if computed else None


def _is_small_result(result: object) -> bool:
    if isinstance(result, list | tuple):
        return len(result) <= MAX_LABELS and all(map(_is_small_result, result))
    return isinstance(result, PLAIN) or (isinstance(result, Tensor) and result.nbytes <= MAX_DATA_BYTES)


def _tables_of(wrapper: Any) -> list[dict[Any, Any]]:
    """Return the dictionary in which a function keeps its results; of a limited cache none."""
    if wrapper.cache_parameters()["maxsize"] is not None:
        return []
    return [one for one in gc.get_referents(wrapper) if type(one) is dict and one is not vars(wrapper)]


def results_of(wrapper: Any) -> list[Any]:
    """Return the results that a function with a cache keeps; of a limited cache, that of a function without arguments."""
    if wrapper.cache_parameters()["maxsize"] is None:
        return [result for table in _tables_of(wrapper) for result in table.values()]
    code = getattr(wrapper.__wrapped__, "__code__", None)
    takes_none = code is not None and not (
        code.co_argcount + code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    )
    return [wrapper()] if takes_none and wrapper.cache_info().currsize else []
