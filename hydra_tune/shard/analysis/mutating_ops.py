"""Finds operators that only overwrite an existing tensor: on tensors without bytes such operators change nothing.

`RehearsalFakeMode` (`shard/fake/fake_world.py`) and the pilot of updates (`shard/cost/update_pilot.py`) ask before each
operator, and skip such operators. In doubt an operator must run, because memory made by a skipped operator does not count.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune.older_torch import is_pointwise

_ATEN = torch.ops.aten
_COPYING = (_ATEN.copy_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)


def overwritten(func: Any, args: Any) -> Tensor | None:
    """Return the first argument of an operator that only overwrites its elements, if the argument has no bytes.

    Returns:
        The operator's result; None if the operator must run.
    """
    target = args[0] if args else None
    if not isinstance(target, Tensor) or not _only_overwrites(func):
        return None
    if isinstance(target, FakeTensor):
        # Torch knows the value of a small constant, which the operator would change.
        return target if target.constant is None else None
    return target if target.is_meta else None


@functools.cache
def _only_overwrites(func: Any) -> bool:
    if func not in _COPYING and not is_pointwise(func):
        return False
    schema = func._schema  # noqa: SLF001 - torch has no other name for it
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    returned = [result.alias_info for result in schema.returns]
    return writes[:1] == [True] and sum(writes) == 1 and len(returned) == 1 and returned[0] is not None
