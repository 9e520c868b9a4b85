"""A trial's connection to its pool: one attempt at the trial, in whichever pool trains the trial.

`PoolTrainable` (`trainable.py`) makes a `TrialClient` at the first step of each attempt, asks for the next report in every
step, and saves and leaves through the client. The module runs in a trial's process, and must not import torch.

Note: waits. A pool answers a question for a report within seconds, if only with `WaitingOutcome`; a pool silent for a minute
is taken for dead. A call that builds a trial may take five minutes, and a call that saves a trial ten. So a trial waits for
training as long as training takes, and for nothing else without a limit.

Note: every question may reach the pool twice, so a repeated question must not change the trial again. A daemon thread renews
the lease; all other calls come from Ray's thread of the trial.
"""

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from hydra_tune.errors import message_line
from hydra_tune_ray.checkpoint_transfer import write_files
from hydra_tune_ray.errors import PoolError, TrialError
from hydra_tune_ray.messages import (
    BeginReply,
    BeginRequest,
    EndOutcome,
    MoveOutcome,
    Outcome,
    ReportOutcome,
    TrialTicket,
    WaitingOutcome,
)
from hydra_tune_ray.node.actors import find_actor
from hydra_tune_ray.node.local_socket import LocalSocketClient
from hydra_tune_ray.version import check_directory

_ANSWER_SECONDS = 60.0
_BEGIN_SECONDS = 300.0
_SAVE_SECONDS = 600.0
_PLACE_SECONDS = 60.0
_LEAVE_SECONDS = 40.0
_LOST_SECONDS = 30.0
_POLL_SECONDS = 0.2
_BEATS = 3
_REMEDY = (
    "Ray tries the trial again, from its last checkpoint, with tune.FailureConfig(max_failures=...); have it checkpoints with "
    "tune.CheckpointConfig(checkpoint_frequency=1)"
)
_LOST = (ValueError, RayActorError, ActorUnschedulableError)
"""Causes of the `PoolError` of a pool that is gone: no actor has its name, the actor has died, or so has the actor's node."""


class TrialClient:
    """One attempt at a trial.

    Args:
        directory: the name of the directory of the pools.
        digest: of the trial's config.
    """

    def __init__(self, directory: str, request: BeginRequest, digest: str) -> None:
        self._directory = directory
        self._request = request
        self._digest = digest
        self._number = request.number
        self._pool_name = ""
        self._pool: Any = None
        self._line: LocalSocketClient | None = None
        self._saved = -1
        self._is_last = False
        self._left = threading.Event()

    def begin(self, ticket: TrialTicket | None) -> None:
        """Start the trial in a pool.

        Args:
            ticket: address where the trial may be waiting; None: the directory chooses a pool.

        Raises:
            TrialError: the task cannot be built.
            PoolError: there is no pool.
        """
        # Renewals run already: building the task may take longer than the lease.
        # A daemon, so that a process that ends without `leave` does not live on for the renewals.
        threading.Thread(target=self._renew, name="hydra-lease", daemon=True).start()
        self._begin_in(None if ticket is None else ticket.pool, ticket)

    def next_report(self) -> ReportOutcome | EndOutcome:
        """Answer the last report, and wait for the next.

        Returns:
            The report; `EndOutcome` only for a trial that has completed, or that has pruned itself after a report.

        Raises:
            TrialError: the trial has failed, was ended by another caller, or has pruned itself (`on_bad_loss`) before its first
                report.
            PoolError: the pool has died.
        """
        while True:
            # The socket answers with reports and waits only; every other answer comes through Ray.
            outcome = self._next_here() or self._asked(_ANSWER_SECONDS, "next", self._request.key, self._number)
            if isinstance(outcome, WaitingOutcome):
                continue
            if isinstance(outcome, MoveOutcome):
                # The new pool counts reports on from here.
                self._request = replace(self._request, files=outcome.files, number=self._number)
                self._begin_in(outcome.pool, None)
                continue
            if isinstance(outcome, EndOutcome):
                self._check(outcome)
                return outcome
            self._number, self._is_last = outcome.number, outcome.is_last
            self._request = replace(self._request, files=None)  # or the object store would keep the files as long
            return outcome

    def save(self, folder: Path) -> TrialTicket:
        """Write the state at the last report, or the final state of a completed trial, to a folder on this node.

        Returns:
            The ticket of the waiting trial, to store beside the files.

        Raises:
            TrialError: the state cannot be saved.
            PoolError: the pool has died.
        """
        # A pool on this node writes to the folder itself; from another node the files come over the network.
        files = self._asked(_SAVE_SECONDS, "save", self._request.key, str(folder) if self._is_here() else None)
        if files is not None:
            write_files(files, folder)
        self._saved = self._number
        return TrialTicket(pool=self._pool_name, key=self._request.key, number=self._number, config=self._digest)

    def is_at(self, ticket: TrialTicket) -> bool:
        """Whether the trial waits at this ticket's report."""
        return ticket.key == self._request.key and ticket.number == self._number and not self._is_last

    def leave(self) -> None:
        """Release the trial: at once, or, if saved at its last report, with the lease, for another process to continue."""
        # First, so that no renewal keeps the trial after its end.
        self._left.set()
        self._hang_up()
        if self._pool is None:
            return
        # Saved at this very report, so Ray may only pause the trial, and another process may come with the ticket.
        parks = self._saved == self._number and not self._is_last
        with contextlib.suppress(RayError):  # a dead pool has dropped the trial already
            ray.get(self._pool.call.remote("end", self._request.key, parks=parks), timeout=_LEAVE_SECONDS)

    def _begin_in(self, pool: str | None, ticket: TrialTicket | None) -> None:
        """Begin in a pool; in another if the pool is lost, for a lost pool has not trained anything of this attempt yet.

        Ray learns only after a while that a node has died, and answers for that node's pools until then. With a failure
        instead, the death of a node would cost a trial two of Ray's retries.

        Args:
            pool: the name of the pool; None: the directory chooses.
            ticket: as of `begin`.
        """
        until = time.monotonic() + _LOST_SECONDS + _PLACE_SECONDS
        while True:
            name = pool or self._placed()
            try:
                self._go_to(name)
                self._begin(ticket)
            except PoolError as error:
                if not isinstance(error.__cause__, _LOST) or time.monotonic() > until:
                    raise
                pool = None
                time.sleep(_POLL_SECONDS)  # the directory, too, learns only after a while
            else:
                return

    def _placed(self) -> str:
        until = time.monotonic() + _PLACE_SECONDS
        try:
            while True:
                try:
                    name = self._chosen(find_actor(self._directory))
                    break
                except ActorUnavailableError:
                    # Ray restarts the directory, on another node if its own has died: it is waited for like a pool.
                    if time.monotonic() > until:
                        raise
                    time.sleep(_POLL_SECONDS)
        except (ValueError, RayError) as error:
            raise PoolError(
                f"the pools of this trial are gone ({message_line(error)}): they end with the program that has started them, "
                "unless they are detached; start them again"
            ) from error
        if not name:
            raise PoolError(
                f"there has been no pool for {_PLACE_SECONDS:g} s: no node of the cluster has devices for one, or it does not "
                "answer; see `ray status`"
            )
        return name

    def _chosen(self, directory: Any) -> str:
        """Return the name of the pool that the directory chooses; empty without any pool."""
        # Before any other message, which another version could not read.
        check_directory(directory, self._directory.removeprefix("pools-"))
        node_id = ray.get_runtime_context().get_node_id()
        # The directory itself waits up to `_PLACE_SECONDS` for a pool to appear.
        call = directory.place.remote(self._request.key, node_id, _PLACE_SECONDS)
        return str(ray.get(call, timeout=_PLACE_SECONDS + _ANSWER_SECONDS))

    def _go_to(self, pool: str) -> None:
        try:
            self._pool_name, self._pool = pool, find_actor(pool)
        except ValueError as error:
            raise PoolError(f"the pool {pool!r} is gone; {_REMEDY}") from error

    def _begin(self, ticket: TrialTicket | None) -> None:
        self._hang_up()
        outcome: BeginReply | EndOutcome = self._asked(_BEGIN_SECONDS, "begin", self._request, ticket)
        if isinstance(outcome, EndOutcome):
            self._check(outcome)
        elif outcome.line and self._is_here():
            with contextlib.suppress(OSError):  # the pool may be in a container of its own, with other files
                self._line = LocalSocketClient(outcome.line, _ANSWER_SECONDS)

    def _next_here(self) -> Outcome | None:
        """Ask the pool over the direct line; None: ask through Ray instead."""
        if self._line is None:
            return None
        try:
            return self._line.next(self._request.key, self._number)
        except OSError:  # the call through Ray finds out why
            self._hang_up()
            return None

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _is_here(self) -> bool:
        # `PoolDirectory` ends the name of each pool with the id of the node.
        return self._pool_name.endswith(f":{ray.get_runtime_context().get_node_id()}")

    def _check(self, over: EndOutcome) -> None:
        name = self._request.name
        if over.status == "failed":
            raise TrialError(f"{name} has failed in its pool: {over.error}")
        if over.status == "unknown":
            raise PoolError(f"the pool of {name} has died and was started again, without the trial; {_REMEDY}")
        if over.status == "pruned":
            if not self._number:
                raise TrialError(
                    f"{name} has a loss that is not finite before its first report, and so no result for Ray"
                )
            return
        if over.status != "completed":
            raise TrialError(f"{name} was ended in its pool by another caller ({over.status})")

    def _asked(self, seconds: float, method: str, *args: Any) -> Any:
        name, deadline = self._request.name, time.monotonic() + _LOST_SECONDS
        try:
            while True:
                try:
                    return ray.get(self._pool.call.remote(method, *args), timeout=seconds)
                except (
                    ActorUnavailableError
                ):  # the network, or Ray restarts the actor; every question may be asked twice
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_POLL_SECONDS)
        except GetTimeoutError as error:
            raise PoolError(f"the pool of {name} has not answered for {seconds:g} s; {_REMEDY}") from error
        except RayTaskError as error:
            raise TrialError(f"{name}: {message_line(error.cause)}") from error
        except (RayActorError, ActorUnschedulableError) as error:
            raise PoolError(f"the pool of {name} has died: {message_line(error)}; {_REMEDY}") from error

    def _renew(self) -> None:
        while not self._left.wait(self._request.lease_seconds / _BEATS):
            if self._pool is None:
                continue
            with contextlib.suppress(RayError):
                # Without waiting for the answer: a slow pool must not delay the next renewal.
                self._pool.call.remote("renew", (self._request.key,))
