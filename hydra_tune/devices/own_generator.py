"""A thread's own generator, in place of the default one of the whole process.

Torch's operators on CPU draw from one default generator, which any thread of the process may draw from, or seed, at any time.
A trial's numbers must not depend on that, so the threads that work for trials do not draw from it: neither what they run nor
what is asked of the generator meanwhile (`torch.manual_seed`, `torch.get_rng_state`) comes near it.

Note: how. Torch's dispatcher has each operator pass by several keys before its kernel. At the last of these, below autograd
and whatever follows operators, those that take a generator are given the thread's own one here, if they were called with none.
All others draw by calling such (dropout, recurrent layers, `torch.rand`), so that nothing of torch's own draws from the default
generator there. Nothing changes for threads without a generator of their own, but for three microseconds at each such operator.
What torch's functions do with the state of the default generator goes through a stand-in for it in `torch.random`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

_KEY = torch._C.DispatchKey.BackendSelect  # noqa: SLF001 - chooses kernels for operators without tensors; these have some
_OWN: ContextVar[torch.Generator | None] = ContextVar("own generator", default=None)
_ARGUMENT = "generator"
# The default generator's identity: each time that an operator is given it there is another object for it.
_DEFAULT = torch.default_generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001
_LOCK = threading.Lock()
_REGISTERED: list[Library] = []  # for as long as it lives


def own_generator() -> torch.Generator | None:
    """The generator that this thread draws from instead of torch's default one, if there is one."""
    return _OWN.get()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let this thread draw from a generator of its own, whatever it runs on the CPU; threads that it starts do not."""
    if not _REGISTERED:
        _register()
    token = _OWN.set(generator)
    try:
        yield
    finally:
        _OWN.reset(token)


def _register() -> None:
    """Have operators ask; once for the process."""
    with _LOCK:
        if _REGISTERED:
            return
        library = Library("aten", "IMPL", "BackendSelect")  # type: ignore[no-untyped-call]
        for operator in _drawing_operators():
            library.impl(operator, _asking(operator), with_keyset=True)  # type: ignore[no-untyped-call]
        vars(torch.random)["default_generator"] = _DefaultGenerator()
        _REGISTERED.append(library)


def _drawing_operators() -> Iterator[OpOverload[..., Any]]:
    """All of torch's operators that take a generator and a tensor; those without a tensor are made of such."""
    dispatched = set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001
    for schema in torch._C._jit_get_all_schemas():  # noqa: SLF001 - to look each operator up by its name takes far longer
        namespace, _, packet = schema.name.partition("::")
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if namespace != "aten" or name not in dispatched:
            continue
        kinds = {argument.name: str(argument.type) for argument in schema.arguments}
        if _ARGUMENT not in kinds or "Tensor" not in kinds.values() or not hasattr(torch.ops.aten, packet):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), schema.overload_name or "default", None)
        if operator is not None:
            yield operator


def _asking(operator: OpOverload[..., Any]) -> Callable[..., Any]:
    """The operator, drawing from the thread's own generator, if there is one, unless it is given another."""
    place = [argument.name for argument in operator._schema.arguments].index(_ARGUMENT)  # noqa: SLF001

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = _OWN.get()
        if own is not None:
            given = args[place] if len(args) > place else kwargs.get(_ARGUMENT)
            if (given is None or given._cdata == _DEFAULT) and _computes_on_cpu(args, kwargs):  # noqa: SLF001
                if len(args) > place:
                    args = (*args[:place], own, *args[place + 1 :])
                else:
                    kwargs[_ARGUMENT] = own
        return operator.redispatch(keys.remove(_KEY), *args, **kwargs)

    return run


def _computes_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator has a kernel on the CPU to run; for tensors of some classes others have, or none."""
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return tensor is not None and tensor.is_cpu and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


class _DefaultGenerator:
    """Stands in `torch.random` for the default generator: it is another one in threads that have their own."""

    def __getattr__(self, name: str) -> Any:
        own = _OWN.get()
        return getattr(torch.default_generator if own is None else own, name)
