"""A direct Unix socket from a trial's process to the pool of the same node, for the question asked at every report.

Ray takes a millisecond or more for an actor call, and as much time of the CPUs that the pool computes on; the socket
takes a tenth of both. `NodePool` (`node_pool.py`) listens once the devices are open, and `TrialClient` (`client.py`)
connects when a trial begins on the same node. The client's side must not import torch.

Note: fallback. Every question may be asked twice, and a client asks again through Ray where the socket cannot be
opened, breaks or times out, and for every answer other than a report or a wait. Access to the socket's folder is
limited to the pool's own user; the protocol is JSON, one line each way.
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

from hydra_tune_ray.messages import Outcome, ReportOutcome, WaitingOutcome

_LOGGER = logging.getLogger("hydra_tune.ray")
_ELSEWHERE = False  # the client asks through Ray


class LocalSocketServer:
    """The pool's end of the line, in the pool's event loop.

    Args:
        answer: as of `NodePool.next`.

    Attributes:
        path: of the socket; empty without a socket, and all clients ask through Ray.
    """

    def __init__(self, answer: Callable[[str, int], Awaitable[Outcome]]) -> None:
        self.path = ""
        self._answer = answer
        self._folder = ""
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen, if the machine supports Unix sockets."""
        if not hasattr(socket, "AF_UNIX"):
            return
        try:
            self._folder = tempfile.mkdtemp(prefix="hydra-tune-ray-")  # readable by this user only
            path = str(Path(self._folder) / "line")
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError as error:  # for example a path too long for a socket
            _LOGGER.info(
                "No socket can be opened, so trials on this node ask through Ray, which takes longer: %s", error
            )
        else:
            self.path = path

    def close(self) -> None:
        """Stop listening, and remove the socket's folder."""
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


class LocalSocketClient:
    """A trial's end of the line; raises an OSError where no pool listens."""

    def __init__(self, path: str, answer_seconds: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(answer_seconds)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        # Buffered, so that an answer in several packets is still read as a line.
        self._answers = self._socket.makefile("rb")

    def next(self, key: str, answered: int) -> ReportOutcome | WaitingOutcome | None:
        """Ask as `NodePool.next` is asked; None: ask through Ray instead.

        Raises:
            OSError: no answer came.
        """
        self._socket.sendall(json.dumps([key, answered]).encode() + b"\n")
        answer = self._answers.readline()
        # A pool that dies mid-answer leaves a partial line.
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("the pool has hung up")
        content = json.loads(answer)
        if content is _ELSEWHERE:
            return None
        return WaitingOutcome() if content is None else ReportOutcome(**content)

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self._socket.close()


def _said(outcome: Outcome) -> bytes:
    """Encode an answer; JSON keeps every float exactly."""
    if isinstance(outcome, WaitingOutcome):
        return b"null\n"
    try:
        if isinstance(outcome, ReportOutcome):
            return json.dumps(asdict(outcome)).encode() + b"\n"
    except TypeError:  # a metric that is no plain number cannot go through JSON
        pass
    return json.dumps(_ELSEWHERE).encode() + b"\n"
