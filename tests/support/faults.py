"""Processes that end in the worst moment: started afresh from a process that has imported torch already, so that many can be.

A *moment* is text: `package.module:Class.function/when/count`. The process kills itself at that call of the function: "before"
it, "after" it, or "within" it, when half of the first piece that it writes to a file has been written.
"""

import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")


def start(target: Callable[..., object], *arguments: object, errors: Path, moment: str | None = None) -> Any:
    """A process that calls a function and ends.

    Args:
        target: what it calls, of a module.
        arguments: for it.
        errors: where it writes what it raises.
        moment: when it kills itself; None: it does not.
    """
    _FORKS.set_forkserver_preload([target.__module__])
    process = _FORKS.Process(target=_call, args=(target, arguments, errors, moment))
    process.start()
    return process


def ended(process: Any, errors: Path, *, patience_seconds: float = 240.0) -> int:
    """Wait for a process; returns its exit code, which is -9 where it was killed."""
    process.join(patience_seconds)
    assert not process.is_alive(), "it does not end"
    assert process.exitcode in (0, -signal.SIGKILL), errors.read_text() if errors.exists() else process.exitcode
    return int(process.exitcode)


def _call(target: Callable[..., object], arguments: tuple[object, ...], errors: Path, moment: str | None) -> None:
    try:
        if moment is not None:
            die_at(moment)
        target(*arguments)
    except BaseException:
        errors.write_text(traceback.format_exc())
        raise
    finally:
        sys.stdout.flush()


def die_at(moment: str) -> None:
    """Have this process kill itself at a moment."""
    where, when, count = moment.rsplit("/", 2)
    module, _, name = where.partition(":")
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    real, calls, writing = getattr(owner, last), itertools.count(1), threading.local()

    @functools.wraps(real)
    def deadly(*arguments: Any, **named: Any) -> Any:
        is_now = next(calls) == int(count)
        if is_now and when == "before":
            die()
        writing.is_now = is_now and when == "within"
        result = real(*arguments, **named)
        writing.is_now = False
        if is_now and when == "after":
            die()
        return result

    setattr(owner, last, deadly)
    if when == "within":
        pwrite = os.pwrite

        def half(descriptor: int, data: Any, offset: int) -> int:
            if getattr(writing, "is_now", False):
                pwrite(descriptor, memoryview(data)[: max(1, memoryview(data).nbytes // 2)], offset)
                die()
            return pwrite(descriptor, data, offset)

        os.pwrite = half


def die() -> None:
    """As `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
