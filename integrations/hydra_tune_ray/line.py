"""A direct way from a trial's process to the pool of its own node, for what is asked once a report: a Unix socket.

A call of an actor's method takes Ray a millisecond or more, and as much of the CPUs that the pool computes on; this takes a
tenth of that.

Note: nothing depends on it. The question may be asked twice, and is asked again by Ray where this way cannot be opened, breaks,
or has no answer in time, and where the answer is more than a report. Whoever may open the socket's folder is the pool's own
user; what goes through it is JSON, a line each way.
"""

import asyncio
import json
import logging
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from hydra_tune_ray.messages import Outcome, Report, Waiting

_LOGGER = logging.getLogger("hydra_tune.ray")
_ELSEWHERE = False  # ask by Ray


class LineServer:
    """The pool's end; in its event loop.

    Args:
        answer: as of `NodePool.next`.

    Attributes:
        path: of the socket; empty: there is none, and all is asked by Ray.
    """

    def __init__(self, answer: Callable[[str, int], Awaitable[Outcome]]) -> None:
        self.path = ""
        self._answer = answer
        self._folder = ""
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen, if this machine lets it."""
        if not hasattr(socket, "AF_UNIX"):
            return
        try:
            self._folder = tempfile.mkdtemp(prefix="hydra-tune-ray-")  # only this user may look into it
            path = str(Path(self._folder) / "line")
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError as error:  # such as a path that is too long for a socket
            _LOGGER.info("Trials of this node ask by Ray, which takes longer, for no socket can be opened: %s", error)
        else:
            self.path = path

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while question := await reader.readline():
                key, answered = json.loads(question)
                writer.write(_said(await self._answer(key, answered)))
                await writer.drain()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said by Ray when the same is asked there
            _LOGGER.debug("The line to a trial ends: %r", error)
        finally:
            writer.close()


class Line:
    """A trial's end.

    Args:
        path: of the socket.
        answer_seconds: how long an answer may take.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str, answer_seconds: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(answer_seconds)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._answers = self._socket.makefile("rb")

    def next(self, key: str, answered: int) -> Report | Waiting | None:
        """Ask as `NodePool.next` is asked.

        Returns:
            The answer, or None: it is to be had by Ray.

        Raises:
            OSError: there is none.
        """
        self._socket.sendall(json.dumps([key, answered]).encode() + b"\n")
        answer = self._answers.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("the pool has hung up")
        found = json.loads(answer)
        if found is _ELSEWHERE:
            return None
        return Waiting() if found is None else Report(**found)

    def close(self) -> None:
        """Hang up."""
        self._answers.close()
        self._socket.close()


def _said(outcome: Outcome) -> bytes:
    """An answer as it is sent; numbers come out as they went in."""
    if isinstance(outcome, Waiting):
        return b"null\n"
    try:
        if isinstance(outcome, Report):
            return json.dumps(asdict(outcome)).encode() + b"\n"
    except TypeError:  # a metric that is no plain number
        pass
    return json.dumps(_ELSEWHERE).encode() + b"\n"
