"""Programs in processes of their own that need not load torch: they are forked from one that has, which conftest.py names.

For tests of what becomes of a process, and of what needs a fresh one. What an interpreter does as it comes up is not seen here.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch

ROOT = Path(__file__).parents[2]
_FORKS = multiprocessing.get_context("forkserver")


def run_code(code: str, *arguments: str) -> None:
    """What `python -c CODE ARGUMENTS...` does."""
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def run_module(name: str, *arguments: str) -> None:
    """What `python -m NAME ARGUMENTS...` does."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class Forked:
    """A program in a process of its own, with what tests use of `subprocess.Popen`, for text.

    Args:
        program: `run_code`, `run_module`, or another function of a module.
        arguments: for it, made text.
        cwd: where it runs, and finds modules.
        environment: its variables; None: those of this process. Torch has been loaded with those that the first one had.
    """

    def __init__(
        self,
        program: Callable[..., object],
        *arguments: object,
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        (out, to_out), (err, to_err) = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
        call = (program, [str(argument) for argument in arguments], cwd, variables, to_out, to_err)
        self._process = _FORKS.Process(target=_call, args=call)
        self._process.start()
        to_out.close()
        to_err.close()
        self.stdout, self.stderr = os.fdopen(os.dup(out.fileno())), os.fdopen(os.dup(err.fileno()))
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.send_signal(signal.SIGKILL)
        self.stdout.close()
        self.stderr.close()
        self._process.join()

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that has ended it; None while it lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints, once it has ended; killed where it lives for longer, and then TimeoutExpired is raised."""
        with ThreadPoolExecutor(2) as readers:
            printed = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self._process.join(timeout)
            is_late = self.returncode is None
            if is_late:
                self.send_signal(signal.SIGKILL)
            out, err = (text.result() for text in printed)
        self._process.join()
        if is_late:
            raise subprocess.TimeoutExpired(str(self._process), timeout, out, err)
        return out, err


def forked(
    program: Callable[..., object], *arguments: object, timeout: float = 240.0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with Forked(program, *arguments, **options) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess([program.__name__, *arguments], process.returncode, out, err)


def _call(
    program: Callable[..., object],
    arguments: list[str],
    cwd: Path,
    environment: dict[str, str],
    out: Connection,
    err: Connection,
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(cwd))
    torch.set_num_threads(1)
    for stream, number, connection in ((sys.stdout, 1, out), (sys.stderr, 2, err)):
        stream.flush()
        os.dup2(connection.fileno(), number)
        stream.reconfigure(line_buffering=True)
        connection.close()
    try:
        program(*arguments)
    finally:
        sys.stdout.flush()
