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
from contextvars import ContextVar, Token
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
_READING = frozenset({"get_state", "initial_seed", "device"})  # what leaves a generator as it is
# Operators of torch 2.11 to 2.13 that take a generator; to look through all of torch's would take 20 ms in each process.
_DRAWING = (
    "_fused_dropout _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential exponential_ "
    "geometric geometric_ log_normal log_normal_ multinomial normal normal_ normal_functional poisson rand rand_like randint "
    "randint_like randn randn_like random random_ randperm rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ "
    "rrelu_with_noise_functional uniform uniform_"
)
_LOCK = threading.Lock()
_REGISTERED: list[Library] = []  # for as long as it lives


class OwnGenerator(torch.Generator):
    """A generator that counts.

    Attributes:
        moves: how often operators that were given no generator have drawn from it, or functions of torch set it.
    """

    moves: int = 0

    def become_own(self) -> Token[torch.Generator | None]:
        """As `drawing_from`, until whoever calls this resets the variable; once operators ask (`install`)."""
        return _OWN.set(self)


def own_generator() -> torch.Generator | None:
    """The generator that this thread draws from instead of torch's default one, if there is one."""
    return _OWN.get()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let this thread draw from a generator of its own, whatever it runs on the CPU; threads that it starts do not."""
    install()
    token = _OWN.set(generator)
    try:
        yield
    finally:
        _OWN.reset(token)


def install() -> None:
    """Have operators ask; once for the process."""
    if _REGISTERED:
        return
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
    for packet in _DRAWING.split():
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{packet}"):  # noqa: SLF001 - empty if torch has none
            if takes_generator(schema):
                yield getattr(getattr(torch.ops.aten, packet), schema.overload_name or "default")


def takes_generator(schema: Any) -> bool:
    """Whether an operator of such a schema is dispatched, and takes a generator and a tensor."""
    arguments = schema.arguments
    return (
        any(each.name == _ARGUMENT for each in arguments)
        and any(str(each.type) == "Tensor" for each in arguments)
        and torch._C._dispatch_has_kernel(  # noqa: SLF001
            f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        )
    )


def _asking(operator: OpOverload[..., Any]) -> Callable[..., Any]:
    """The operator, drawing from the thread's own generator, if there is one, unless it is given another."""
    place = [argument.name for argument in operator._schema.arguments].index(_ARGUMENT)  # noqa: SLF001
    redispatch = operator._handle.redispatch_boxed  # noqa: SLF001 - as `OpOverload.redispatch`, a call less

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = _OWN.get()
        if own is not None:
            given = args[place] if len(args) > place else kwargs.get(_ARGUMENT)
            if (given is None or given._cdata == _DEFAULT) and _computes_on_cpu(args, kwargs):  # noqa: SLF001
                if len(args) > place:
                    args = (*args[:place], own, *args[place + 1 :])
                else:
                    kwargs[_ARGUMENT] = own
                if isinstance(own, OwnGenerator):
                    own.moves += 1
        return redispatch(keys.remove(_KEY), *args, **kwargs)

    return run


def _computes_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator has a kernel on the CPU to run; for tensors of some classes others have, or none."""
    if args and type(args[0]) is Tensor:  # as nearly always; this runs at each draw
        return args[0].is_cpu
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return tensor is not None and tensor.is_cpu and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


class _DefaultGenerator:
    """Stands in `torch.random` for the default generator: it is another one in threads that have their own."""

    def __getattr__(self, name: str) -> Any:
        own = _OWN.get()
        if isinstance(own, OwnGenerator) and name not in _READING:
            own.moves += 1
        return getattr(torch.default_generator if own is None else own, name)
