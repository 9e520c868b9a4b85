"""Reasons why a step cannot be planned: draws other than dropout's, failing operators, tensors on several devices.

The error messages name the operator or the tensors, so the user knows what to change in the model. `step_graph`
(`step_graph.py`) checks the devices before tracing a step where its tensors lie, as for a CPU. The function asks for the
operators to name when tracing fails, or meets draws that no graph draws ahead. Nothing here draws or computes: everything runs
on tensors without bytes. The callers of `step_graph` hold the capture gate alone, since a trace changes the whole process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.batched.batched_random import noting
from hydra_tune.errors import UnfusableError
from hydra_tune.shard.execute.compute import ShardOperands


def value_draws(run: Any, operands: ShardOperands, place: torch.device | None = None) -> list[str]:
    """Return the operators whose random numbers no graph draws ahead, because the numbers may depend on values."""
    mode, calls = FakeTensorMode(), OperatorCallRecorder()
    with mode:
        fakes = [
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place or tensor.device)
            for tensor in operands.all
        ]
    with mode, torch.no_grad(), noting() as tape, calls:
        run(*fakes)
    return sorted(calls.random | set(tape.refused))


class OperatorCallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the called operators, to name the operator that fails or draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last = "(none)"
        self.random: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before the call, which may fail.
        self.last = str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.add(self.last)
        return func(*args, **(kwargs or {}))


def check_devices(names: Sequence[str], operands: ShardOperands) -> None:
    """Refuse tensors on several devices.

    Raises:
        UnfusableError: the tensors lie on several devices; the message names a tensor on each device.
    """
    kinds = {"constant": operands.constants, "tensor of the batch": operands.inputs}
    named_tensors = [*zip(names, operands.state, strict=True)]
    named_tensors += [
        (f"{kind} {place}", operand) for kind, tensors in kinds.items() for place, operand in enumerate(tensors)
    ]
    names_by_device: dict[str, str] = {}
    for name, tensor in named_tensors:
        names_by_device.setdefault(str(tensor.device), name)
    if len(names_by_device) > 1:
        places_text = ", ".join(f"{name} on {device}" for device, name in sorted(names_by_device.items()))
        raise UnfusableError(
            f"its tensors are on several devices ({places_text}), and a plan is of one; it runs unplanned"
        )
