"""`RehearsalFakeMode`: a world of tensors with sizes but no bytes, in which code that reads values can run as well.

`pool/dry_run/report.py` makes the rehearsed trials in this mode, and `PoolRehearsal` (`pool/dry_run/executor.py`) runs
all units of a rehearsal in the same mode. The pilot of updates (`shard/cost/update_pilot.py`) steps large stand-ins,
which cannot be stepped on `meta`, on tensors of this mode. A mode serves one thread: the count of reads has no lock.
`EndlessReadError` must be no `HydraTuneError`, so that `PoolRehearsal` fails one task and not the forecast. The module
must not compute numbers.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.shard.analysis.mutating_ops import overwritten

_READ = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what item(), float() and bool() come down to

_MOST_READS = 30_000  # in one unit with the updates that follow at once: some seconds

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class EndlessReadError(Exception):
    """Code reads values without end, like a loop that waits for a value other than 1."""


class RehearsalFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode in which new tensors have sizes but no bytes. Rehearsals are made and run inside the mode.

    Every read of a value returns 1, or True: losses and norms are finite, and an optimizer can divide by its counters.
    Code that reads values without end, like a loop that waits for another value, is stopped by `EndlessReadError`.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._num_reads = 0

    def begin_unit(self) -> None:
        """Reset the count of reads before another unit."""
        self._num_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Any:
        if func is _READ:
            self._num_reads += 1
            if self._num_reads > _MOST_READS:
                raise EndlessReadError(
                    f"it has read {_MOST_READS:,} values in one unit, each of which is taken to be 1"
                )
            dtype = args[0].dtype
            return dtype == torch.bool or (1.0 if dtype.is_floating_point else 1)
        # Following an operator that only overwrites would take time and change nothing (`mutating_ops`).
        target = overwritten(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs) if target is None else target
