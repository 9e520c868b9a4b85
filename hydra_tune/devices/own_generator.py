"""A random generator of a thread's own, in place of the process's default generator.

Torch's CPU operators draw from a single default generator, which any thread of the process may draw from, or seed, at
any time. A trial's random numbers must not depend on other threads, so threads that work for trials draw on the CPU from
generators of their own, also in calls about the generator (`torch.manual_seed`, `torch.get_rng_state`). `RandomStreams`
(`train/rng/rng_streams.py`) and, for a group, `GroupStreams` (`fusion/group/group_rng.py`) set the generator of a thread
while the code of a trial, or a unit that draws, runs; `shard/verify/step_outcome.py` does so when a plan is checked,
`train/data/index_gather.py` to try torch's sampler once, and `batched/batched_random.py` while an operator that takes no
generator runs for a single member. `devices/cpu.py` asks for the thread's generator; `batched/batched_random.py`,
`batched/joint_graph.py` and `fusion/runtime/step_arguments.py` ask for the generator of a group. The module must not know
blocks, models or trials.

Note: mechanism. Torch's dispatcher passes each operator through several keys before its kernel. At the last key, below
autograd and all modes that observe operators, a wrapper gives the thread's generator to each operator of `_DRAWING` that
runs on the CPU and was called without a generator, or with the default generator. All other random operators of the CPU
call these operators (dropout, recurrent layers, `torch.rand`), so none draws from the default generator on such a thread.
Threads without their own generator see no change, except three microseconds per wrapped call. Torch's functions on the
default generator's state go through a stand-in for the generator in `torch.random`. The wrappers stay until the process ends.

Note: locks. `_LOCK` guards the installation alone. `RandomStreams` calls `install` with its own lock held.
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

_KEY = torch._C.DispatchKey.BackendSelect  # noqa: SLF001 - selects kernels of tensorless operators; free here, as these have tensors
_OWN: ContextVar[torch.Generator | None] = ContextVar("own generator", default=None)
_ARGUMENT = "generator"
# The default generator's identity: operators receive a new Python object for the default generator at each call.
_DEFAULT = torch.default_generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001
_READING = frozenset({"get_state", "initial_seed", "device"})  # attributes that leave a generator unchanged
# Operators of torch 2.11 to 2.13 with a generator argument; a search through all of torch's operators would take 20 ms
# per process.
_DRAWING = (
    "_fused_dropout _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential exponential_ "
    "geometric geometric_ log_normal log_normal_ multinomial normal normal_ normal_functional poisson rand rand_like randint "
    "randint_like randn randn_like random random_ randperm rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ "
    "rrelu_with_noise_functional uniform uniform_"
)
_LOCK = threading.Lock()
_REGISTERED: list[Library] = []  # kept alive: torch drops the wrappers with the library object


class ThreadGenerator(torch.Generator):
    """A generator that counts its uses.

    Attributes:
        moves: number of draws by operators that were called without this generator, and of uses by torch's functions that
            may change the state.
    """

    moves: int = 0

    def become_own(self) -> Token[torch.Generator | None]:
        """Make this object the thread's generator until a reset with the token; requires `install`."""
        return _OWN.set(self)


def own_generator() -> torch.Generator | None:
    """Return this thread's own generator in place of torch's default generator, if any."""
    return _OWN.get()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let this thread draw from a generator in all CPU work; threads that this thread starts do not."""
    install()
    token = _OWN.set(generator)
    try:
        yield
    finally:
        _OWN.reset(token)


def install() -> None:
    """Wrap the drawing operators and replace the default generator in `torch.random`, once for the process."""
    # Checked without the lock first, because all calls but the earliest come after the installation.
    if _REGISTERED:
        return
    with _LOCK:
        if _REGISTERED:
            return
        library = Library("aten", "IMPL", "BackendSelect")  # type: ignore[no-untyped-call]
        for operator in _drawing_operators():
            library.impl(operator, _asking(operator), with_keyset=True)  # type: ignore[no-untyped-call]
        vars(torch.random)["default_generator"] = _DefaultGenerator()
        # Last, because other threads skip the lock once the list has an entry.
        _REGISTERED.append(library)


def _drawing_operators() -> Iterator[OpOverload[..., Any]]:
    """Yield torch's operators with a generator and a tensor argument; operators without a tensor call these."""
    for packet in _DRAWING.split():
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{packet}"):  # noqa: SLF001 - empty if torch has none
            if takes_generator(schema):
                yield getattr(getattr(torch.ops.aten, packet), schema.overload_name or "default")


def takes_generator(schema: Any) -> bool:
    """Return whether operators of a schema are dispatched, and take a generator and a tensor."""
    arguments = schema.arguments
    return (
        any(each.name == _ARGUMENT for each in arguments)
        and any(str(each.type) == "Tensor" for each in arguments)
        and torch._C._dispatch_has_kernel(  # noqa: SLF001
            f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        )
    )


def _asking(operator: OpOverload[..., Any]) -> Callable[..., Any]:
    """Wrap an operator to draw from the thread's own generator, if any, unless called with another generator."""
    place = [argument.name for argument in operator._schema.arguments].index(_ARGUMENT)  # noqa: SLF001
    redispatch = operator._handle.redispatch_boxed  # noqa: SLF001 - as `OpOverload.redispatch`, a call less

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the operator with the thread's own generator in place of the default generator."""
        thread_generator = _OWN.get()
        if thread_generator is not None:
            passed_generator = args[place] if len(args) > place else kwargs.get(_ARGUMENT)
            # A call that names the default generator counts as a call without one: other threads draw from the
            # default generator, too.
            if (passed_generator is None or passed_generator._cdata == _DEFAULT) and _computes_on_cpu(args, kwargs):  # noqa: SLF001
                if len(args) > place:
                    args = (*args[:place], thread_generator, *args[place + 1 :])
                else:
                    kwargs[_ARGUMENT] = thread_generator
                if isinstance(thread_generator, ThreadGenerator):
                    thread_generator.moves += 1
        # Below this key, or the call would come back to this wrapper.
        return redispatch(keys.remove(_KEY), *args, **kwargs)

    return run


def _computes_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator runs a CPU kernel; tensor subclasses may run other kernels, or none."""
    if args and type(args[0]) is Tensor:  # the common case first, because every draw runs this code
        return args[0].is_cpu
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return tensor is not None and tensor.is_cpu and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


class _DefaultGenerator:
    """Stand-in for the default generator in `torch.random`; resolves to the thread's own generator, if any."""

    def __getattr__(self, name: str) -> Any:
        thread_generator = _OWN.get()
        # Any other attribute may seed the generator or set its state, which moves the stream as draws do.
        if isinstance(thread_generator, ThreadGenerator) and name not in _READING:
            thread_generator.moves += 1
        return getattr(torch.default_generator if thread_generator is None else thread_generator, name)
