"""The pool of one node: owns the node's devices, and trains the tasks that trials' clients bring.

The pool runs in a Ray actor. The actor's event loop only routes messages; tasks are built, copied and written in worker
threads, and the devices compute in the executor's threads. `PoolActor` (`actors.py`) makes the `NodePool` at the first
call, and forwards each call of a client or of the directory; `LocalSocketServer` (`local_socket.py`) calls `next`. The module
must not import Ray Tune.

Note: waits. The pool answers `next` within seconds, if only with `WaitingOutcome`. Calls that build, copy, write or end a trial
may take minutes, and their callers allow for minutes. The heartbeat waits for no trial.

Note: threads. All state here changes on the event loop alone, without locks of threads. A change across an `await` must look
again whether the trial is still in the table. Nothing on the loop may block longer than the executor's own lock.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import ray
from ray.exceptions import RayError

from hydra_tune.errors import TaskError
from hydra_tune.pool.job import Job
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import (
    BeginReply,
    BeginRequest,
    EndOutcome,
    Files,
    MoveOutcome,
    Outcome,
    PoolFigures,
    ReportOutcome,
    TrialTicket,
    WaitingOutcome,
)
from hydra_tune_ray.node.actors import NodePoolSpec
from hydra_tune_ray.node.heartbeat import DirectoryConnection
from hydra_tune_ray.node.local_socket import LocalSocketServer
from hydra_tune_ray.node.pool_runtime import NodePoolRuntime
from hydra_tune_ray.node.trial_leases import LeasedTrial, LeasedTrialTable, told

_LOGGER = logging.getLogger("hydra_tune.ray")
_ANSWER_SECONDS = 10.0
_PULSE_SECONDS = 0.5
_MOVED_SECONDS = 30.0
_END_SECONDS = 30.0
_FETCH_SECONDS = 240.0
_THREADS = 64  # nearly all of them wait; a hanging build blocks only its own thread


class NodePool:
    """See the module's docstring. Any number of clients may call any methods at once."""

    def __init__(self, place: NodePoolSpec) -> None:
        self._place = place
        self._training: NodePoolRuntime | None = None
        self._trials = LeasedTrialTable(_ANSWER_SECONDS)
        self._opening = asyncio.Lock()
        self._pulse: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._num_moved = 0
        self._telling = DirectoryConnection(place.name, place.directory)
        self._line = LocalSocketServer(self.next)
        # The loop's default of a few threads would let waiting calls hold up the builds.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "hydra-ray"))

    @property
    def is_open(self) -> bool:
        """Whether the devices are open; from then on the heartbeat reports to the directory."""
        return self._training is not None

    async def open(self) -> str:
        """Open the devices; a repeated call changes nothing.

        Returns:
            The error in the options, or an empty text.
        """
        # Several trials may come at once, and the devices must be opened once.
        async with self._opening:
            if self._training is None:
                options = {**self._place.options, "devices": self._place.node.devices}
                try:
                    self._training = await asyncio.to_thread(NodePoolRuntime, options)
                except Exception as error:  # noqa: BLE001 - whatever it is, whoever has started the pool is to see it
                    return told(error)
                # Before the heartbeat, so that every reply names the socket.
                await self._line.open()
                self._pulse = asyncio.create_task(self._beat())
        return ""

    async def begin(self, request: BeginRequest, ticket: TrialTicket | None = None) -> EndOutcome | BeginReply:
        """Train a trial: continue the waiting trial of a ticket, or begin and end all other attempts at the trial.

        Returns:
            The address for questions from this node, or the reason why there is nothing to train.
        """
        earlier = self._trials.get(request.key)
        if earlier is not None:
            # A repeated call, after a lost answer, must not train the trial a second time.
            return earlier.said if isinstance(earlier.said, EndOutcome) else BeginReply(line=self._line.path)
        if ticket is not None:
            waiting_trial = self._trials.get(ticket.key)
            if waiting_trial is not None and self._waits_at(waiting_trial, ticket):
                self._trials.hand_on(waiting_trial, replace(request, files=waiting_trial.request.files))
                return BeginReply(line=self._line.path)
        error_text = await self.open()
        if error_text:
            return EndOutcome(status="failed", error=error_text)
        # Ray runs a trial in one process at a time, so earlier attempts have no client any more.
        await self._end([trial for trial in self._trials if trial.request.trial_id == request.trial_id])
        trial, events = self._trials.add(request)
        try:
            assert self._training is not None
            trial.job = await asyncio.to_thread(self._training.submit, request, await _fetched(request.files), events)
            trial.at_end = self._training.copy_at_end(trial.job)
        except Exception as error:  # noqa: BLE001 - a trial's own code may raise anything; it fails alone
            trial.said = EndOutcome(status="failed", error=told(error))
            return trial.said
        if self._trials.get(request.key) is not trial:  # the client ended the trial during the build
            trial.job.cancel()
            await self._ended(trial)  # `_end` has found no job to wait for
        return BeginReply(line=self._line.path)

    async def next(self, key: str, answered: int) -> Outcome:
        """Answer a report, and wait for the trial's next message.

        Args:
            key: of the trial.
            answered: number of the last report that the client has received; the trial continues if it waits at this
                report.
        """
        trial = self._trials.get(key)
        if trial is None:
            return self._trials.moved(key) or EndOutcome(status="unknown")
        self._trials.renew(trial)
        # Only this report is answered: a repeated call with an earlier number gets the present report again.
        if isinstance(trial.said, ReportOutcome) and trial.said.number == answered:
            if trial.leaves:
                return await self._moved(trial)
            trial.said = None
            trial.request = replace(trial.request, files=None)  # or the object store would keep the files as long
            assert trial.job is not None
            trial.job.proceed()
        outcome = await self._trials.next_of(trial)
        self._trials.renew(trial)
        return await self._moved(trial) if outcome is None else outcome

    async def save(self, key: str, folder: str | None) -> Files | None:
        """Write the state of a trial that waits at a report or has completed.

        Returns:
            The files, if no folder of this node is given or the trial has completed; else None.

        Raises:
            HydraTuneError: as `HydraExecutor.save_to`, or the trial is not in this pool.
        """
        trial = self._trials.get(key)
        if trial is None or trial.job is None or self._training is None:
            raise TaskError("there is no such trial in this pool any more")
        self._trials.renew(trial)
        if isinstance(trial.said, EndOutcome):
            return await self._last_state(trial)
        if folder is not None:
            await asyncio.to_thread(self._training.save, trial.job, folder)
            return None
        return await asyncio.to_thread(self._training.read_saved, trial.job)

    async def _last_state(self, held: LeasedTrial) -> Files:
        assert self._training is not None
        copy, error = held.at_end, None
        if copy is not None and copy.done() and not copy.cancelled():
            error = copy.exception()
            if error is None:
                return await asyncio.to_thread(self._training.read_copied, copy.result())
        files = await _fetched(held.request.files)  # the trial had nothing left to train after these files
        if files is None:
            raise TaskError(f"the state that {held.request.name} has ended with was not kept: {error}") from error
        return files

    async def end(self, key: str, *, parks: bool = False) -> None:
        """End a trial that the client no longer wants; or, with `parks`, leave the trial to another client and the lease."""
        trial = self._trials.get(key)
        if trial is None:
            return
        if parks and isinstance(trial.said, ReportOutcome):
            self._trials.renew(trial)
        else:
            await self._end([trial])

    async def end_trial(self, trial_id: str) -> None:
        """End all attempts at a trial that Ray has finished."""
        await self._end([trial for trial in self._trials if trial.request.trial_id == trial_id])

    async def renew(self, keys: tuple[str, ...]) -> None:
        """Renew the leases of trials whose client lives."""
        for key in keys:
            trial = self._trials.get(key)
            if trial is not None:
                self._trials.renew(trial)

    async def figures(self) -> PoolFigures:
        """Return the pool's figures."""
        stats = None if self._training is None else await asyncio.to_thread(self._training.executor.stats)
        return PoolFigures(
            name=self._place.name,
            node_id=self._place.node.node_id,
            pid=os.getpid(),
            trials=tuple(trial.request.name for trial in self._trials),
            devices=() if self._training is None else self._training.device_names,
            busy_seconds=0.0 if stats is None else sum(device.busy_seconds for device in stats.devices.values()),
            units_run=0 if stats is None else stats.units_run,
            moved=self._num_moved,
            width=0 if self._training is None else self._training.executor.width,
        )

    async def close(self) -> None:
        """End all trials and free the devices; the caller kills the actor afterwards."""
        # The heartbeat itself closes a pool without a directory, and must not cancel itself.
        if self._pulse is not None and self._pulse is not asyncio.current_task():
            self._pulse.cancel()
        self._line.close()
        if self._training is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._training.close), _END_SECONDS)

    def _waits_at(self, held: LeasedTrial, ticket: TrialTicket) -> bool:
        return isinstance(held.said, ReportOutcome) and held.said.number == ticket.number and not held.said.is_last

    async def _end(self, trials: list[LeasedTrial]) -> None:
        """Drop trials, and wait up to `_END_SECONDS` until their jobs are over."""
        for trial in trials:
            # Removed first: a client that asks meanwhile is told that the trial is unknown.
            self._trials.remove(trial)
            if trial.job is not None and isinstance(trial.said, ReportOutcome) and trial.said.is_last:
                trial.job.proceed()  # nothing left to train: let the job complete
            elif trial.job is not None:
                trial.job.cancel()
        await asyncio.gather(*map(self._ended, trials))

    async def _ended(self, held: LeasedTrial) -> None:
        assert self._training is not None
        if held.job is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(held.job.result, _END_SECONDS)
        # Only now: until its end the job may still read the files that it resumed from.
        await asyncio.to_thread(self._training.forget, held.folder)

    async def _moved(self, held: LeasedTrial) -> Outcome:
        """Move a trial out; its client carries the state to the other pool once the copy is done."""
        if held.leaving is None:
            held.leaving = asyncio.create_task(self._leave(held))
        leaving = held.leaving
        # asyncio.wait leaves the copy running at the timeout; the client asks again and waits for the same task.
        done, _ = await asyncio.wait([leaving], timeout=_ANSWER_SECONDS)
        return leaving.result() if done else WaitingOutcome()

    async def _leave(self, held: LeasedTrial) -> Outcome:
        assert held.target is not None
        assert held.job is not None
        assert self._training is not None
        files = held.request.files
        if isinstance(held.said, ReportOutcome):
            try:
                copying = asyncio.to_thread(self._copied, held.job)
                files = await asyncio.wait_for(copying, _FETCH_SECONDS)
            except Exception as error:  # noqa: BLE001 - whatever it is, the trial stays and goes on here
                held.stay()
                if self._trials.get(held.request.key) is held:  # otherwise the trial was ended meanwhile
                    _LOGGER.warning("%s stays where it is, for it cannot be copied: %s", held.request.name, told(error))
                    held.said = None
                    held.job.proceed()
                return WaitingOutcome()
        # The trial was ended during the copy.
        if self._trials.get(held.request.key) is not held:
            return WaitingOutcome()
        self._num_moved += 1
        forwarding = self._trials.leave(held, MoveOutcome(pool=held.target, files=files), _MOVED_SECONDS)
        await self._end([held])
        return forwarding

    def _copied(self, job: Job) -> Any:
        """Put a job's state into Ray's object store; blocks."""
        assert self._training is not None
        return ray.put(self._training.read_saved(job))

    async def _beat(self) -> None:
        """Report to the directory, send off trials that should move, and end trials with expired leases."""
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(_PULSE_SECONDS)
            # Time in which this process itself did not run is no fault of the clients.
            expired_trials = self._trials.expired(time.monotonic() - slept_at - _PULSE_SECONDS)
            for trial in expired_trials:
                _LOGGER.warning(
                    "%s ends: its client has not asked for %g s", trial.request.name, trial.request.lease_seconds
                )
            if expired_trials:
                self._in_background(self._end(expired_trials))
            try:
                moves = await self._telling.tell(self._trials.load(self._place.node))
            except PoolError as error:
                _LOGGER.warning("The pool %s ends: %s", self._place.name, error)
                # Without a directory no new trial can come, and nobody can end the pool.
                await self.close()
                ray.kill(ray.get_runtime_context().current_actor)
                return
            for key, target in moves.items():
                leaving = self._trials.get(key)
                if leaving is not None:
                    leaving.send_to(target)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        # The loop holds only weak references to tasks: keep a strong one, or the work may be collected unfinished.
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _fetched(files: Any) -> Files | None:
    """Fetch a checkpoint's files, if necessary from another node's object store."""
    if not isinstance(files, ray.ObjectRef):
        return cast("Files | None", files)

    async def fetch() -> Files:
        return cast("Files", await files)

    try:
        return await asyncio.wait_for(fetch(), _FETCH_SECONDS)
    except (RayError, TimeoutError) as error:
        raise PoolError(
            "the state that the trial resumes from could not be fetched: its process is gone or does not answer "
            f"({type(error).__name__}); Ray tries again, from the last checkpoint, with "
            "tune.FailureConfig(max_failures=...)"
        ) from error
