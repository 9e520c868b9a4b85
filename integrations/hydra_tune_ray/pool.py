"""The pool of one node: it owns the node's devices, and trains what trials' clients bring.

Runs in an actor of Ray. Its event loop only passes on; tasks are built, copied and written in threads of their own, and devices
work in those of the pool.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import TaskError
from hydra_tune.pool.job import EventStream, Job
from hydra_tune_ray.actors import Place, find_actor
from hydra_tune_ray.building import built
from hydra_tune_ray.files import read_files, write_files
from hydra_tune_ray.held import Held, HeldTrials, told
from hydra_tune_ray.messages import Begin, Files, Moved, Outcome, Over, PoolFigures, Report, Ticket

_LOGGER = logging.getLogger("hydra_tune.ray")
_ANSWER_SECONDS = 10.0
_PULSE_SECONDS = 0.5
_LOST_SECONDS = 30.0
_END_SECONDS = 30.0


class NodePool:
    """See the module. All methods may be called at once, by any number of clients.

    Args:
        place: which pool this is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._executor: HydraExecutor | None = None
        self._trials = HeldTrials(_ANSWER_SECONDS)
        self._scratch = Path(tempfile.mkdtemp(prefix="hydra-tune-ray-"))
        self._opening = asyncio.Lock()
        self._pulse: asyncio.Task[None] | None = None
        self._num_moved = 0

    async def open(self) -> str:
        """Open the devices; asked again, nothing more happens.

        Returns:
            What is wrong with the options, or nothing.
        """
        async with self._opening:
            if self._executor is None:
                try:
                    self._executor = await asyncio.to_thread(
                        _opened, {**self._place.options, "devices": self._place.node.devices}
                    )
                except Exception as error:  # noqa: BLE001 - whatever it is, whoever has started the pool is to see it
                    return told(error)
                self._pulse = asyncio.create_task(self._beat())
        return ""

    async def begin(self, request: Begin, ticket: Ticket | None = None) -> Over | None:
        """Train a trial; other attempts at it end.

        Args:
            request: the trial.
            ticket: where it may wait, so that it need not begin from files.

        Returns:
            None, or why there is nothing to train.
        """
        there = self._trials.get(request.key)
        if there is not None:
            return there.said if isinstance(there.said, Over) else None
        if ticket is not None:
            waiting = self._trials.get(ticket.key)
            if waiting is not None and self._waits_at(waiting, ticket):
                self._trials.hand_on(waiting, replace(request, files=waiting.request.files))
                return None
        wrong = await self.open()
        if wrong:
            return Over(status="failed", error=wrong)
        await self._end([held for held in self._trials if held.request.trial_id == request.trial_id])
        held, events = self._trials.add(request)
        try:
            files = await request.files if isinstance(request.files, ray.ObjectRef) else request.files
            held.job = await asyncio.to_thread(self._submitted, request, files, events)
        except Exception as error:  # noqa: BLE001 - a trial's own code may raise anything; it fails alone
            held.said = Over(status="failed", error=told(error))
            return held.said
        if self._trials.get(request.key) is not held:  # it was ended meanwhile
            held.job.cancel()
        return None

    async def next(self, key: str, answered: int) -> Outcome:
        """Answer a report, and wait for what the trial says then.

        Args:
            key: of the trial.
            answered: the number of the last report that its client has had; the trial goes on if it waits at that.
        """
        held = self._trials.get(key)
        if held is None:
            return Over(status="unknown")
        self._trials.renew(held)
        if isinstance(held.said, Report) and held.said.number == answered:
            if held.leaves:
                return await self._moved(held)
            held.said = None
            held.request = replace(held.request, files=None)  # or the object store would keep them as long
            assert held.job is not None
            held.job.proceed()
        said = await self._trials.next_of(held)
        self._trials.renew(held)
        return await self._moved(held) if said is None else said

    async def save(self, key: str, folder: str | None) -> Files | None:
        """Write the state of a trial that waits at a report.

        Args:
            key: of the trial.
            folder: on this node; None: the files are wanted.

        Raises:
            HydraTuneError: as `HydraExecutor.save_to`.
        """
        held = self._trials.get(key)
        if held is None or held.job is None or self._executor is None:
            raise TaskError("there is no such trial in this pool any more")
        self._trials.renew(held)
        if folder is not None:
            await asyncio.to_thread(self._executor.save_to, held.job, folder)
            return None
        return await asyncio.to_thread(self._read_saved, held.job)

    async def end(self, key: str, *, parks: bool = False) -> None:
        """A client does not want a trial any more.

        Args:
            key: of the trial.
            parks: whether another client may come for it, as long as its lease lasts.
        """
        held = self._trials.get(key)
        if held is None:
            return
        if parks and isinstance(held.said, Report):
            self._trials.renew(held)
        else:
            await self._end([held])

    async def end_trial(self, trial_id: str) -> None:
        """Ray is done with a trial: all attempts at it end."""
        await self._end([held for held in self._trials if held.request.trial_id == trial_id])

    async def renew(self, keys: tuple[str, ...]) -> None:
        """The client of these trials lives."""
        for key in keys:
            held = self._trials.get(key)
            if held is not None:
                self._trials.renew(held)

    async def figures(self) -> PoolFigures:
        """What it has done."""
        stats = None if self._executor is None else await asyncio.to_thread(self._executor.stats)
        return PoolFigures(
            name=self._place.name,
            node_id=self._place.node.node_id,
            pid=os.getpid(),
            trials=tuple(held.request.name for held in self._trials),
            devices=() if self._executor is None else self._executor.device_names,
            busy_seconds=0.0 if stats is None else sum(each.busy_seconds for each in stats.devices.values()),
            units_run=0 if stats is None else stats.units_run,
            moved=self._num_moved,
        )

    async def close(self) -> None:
        """End all trials and give the devices back; for the actor to be killed then."""
        if self._pulse is not None and self._pulse is not asyncio.current_task():
            self._pulse.cancel()
        if self._executor is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._executor.shutdown), _END_SECONDS)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _waits_at(self, held: Held, ticket: Ticket) -> bool:
        return isinstance(held.said, Report) and held.said.number == ticket.number and not held.said.is_last

    def _submitted(self, request: Begin, files: Files | None, events: EventStream) -> Job:
        build = ray.cloudpickle.loads(request.build)
        task = built(build, request.config)
        if not isinstance(task, TrainTask):
            raise TaskError(f"build must return a TrainTask, not {type(task).__name__}")
        assert self._executor is not None
        if files is None:
            return self._executor.submit(task, request.name, events)
        folder = self._scratch / request.key
        try:
            write_files(files, folder)
            return self._executor.submit(
                task,
                request.name,
                events,
                resume_from=folder,
                resume="allow-changes" if request.is_changed else "strict",
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _read_saved(self, job: Job) -> Files:
        assert self._executor is not None
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            self._executor.save_to(job, folder)
            return read_files(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _end(self, trials: list[Held]) -> None:
        """Drop trials, and wait until their memory is given back."""
        jobs = []
        for held in trials:
            self._trials.remove(held)
            if held.job is not None:
                if isinstance(held.said, Report) and held.said.is_last:
                    held.job.proceed()  # it has nothing to do any more, and completes
                else:
                    held.job.cancel()
                jobs.append(held.job)
        for job in jobs:
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(job.result, _END_SECONDS)
        for held in trials:
            shutil.rmtree(self._scratch / held.request.key, ignore_errors=True)

    async def _moved(self, held: Held) -> Outcome:
        """Have a trial leave; its client takes it to the other pool."""
        target = held.target
        assert target is not None
        assert held.job is not None
        files = held.request.files
        if isinstance(held.said, Report):
            try:
                files = ray.put(await asyncio.to_thread(self._read_saved, held.job))
            except Exception as error:  # noqa: BLE001 - whatever it is, the trial stays and goes on here
                _LOGGER.warning("%s stays where it is, for it cannot be copied: %s", held.request.name, told(error))
                held.target, held.said = None, None
                held.job.proceed()
                said = await self._trials.next_of(held)
                assert said is not None
                return said
        self._num_moved += 1
        await self._end([held])
        return Moved(pool=target, files=files)

    async def _beat(self) -> None:
        """Tell the directory what there is to do, hear what is to leave, and end what nobody wants."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(_PULSE_SECONDS)
            late = self._trials.expired()
            for held in late:
                _LOGGER.warning(
                    "%s ends: nobody has asked for it for %g s", held.request.name, held.request.lease_seconds
                )
            await self._end(late)
            try:
                await self._tell_directory()
                heard = time.monotonic()
            except (RayError, ValueError, TimeoutError) as error:
                if time.monotonic() - heard > _LOST_SECONDS or isinstance(error, ValueError):
                    _LOGGER.warning("The pool %s ends: %s", self._place.name, error)
                    await self.close()
                    ray.kill(ray.get_runtime_context().current_actor)

    async def _tell_directory(self) -> None:
        assert self._executor is not None
        directory = find_actor(self._place.directory)
        load = self._trials.load(self._place.node)
        moves = await asyncio.wait_for(directory.pulse.remote(self._place.name, load), _ANSWER_SECONDS)
        for key, target in cast("Mapping[str, str]", moves).items():
            held = self._trials.get(key)
            if held is not None:
                held.send_to(target)


def _opened(options: Mapping[str, Any]) -> HydraExecutor:
    executor = HydraExecutor(**options)
    executor.device_names  # noqa: B018 - opens the devices, which may not be there
    return executor
