"""`PlainPool`: the second implementation of the executor's contract, by the plain loop.

One job computes at a time; a job that waits at a report lets the others compute. Each job runs `train_plain` in a
thread of its own, with its own random streams. No shards, no budget: where the real pool and this one disagree, the
real one is wrong.
"""

import queue
import random
import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from hydra_tune import Failed, Finished, Reported, train_plain
from hydra_tune.errors import ConfigError


@dataclass(kw_only=True)
class PlainResult:
    status: str
    metrics: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    error: BaseException | None = None
    trained: object = None

    def state_dict(self):
        return self.trained.state_dict()


class PlainStream:
    def __init__(self):
        self._events = queue.SimpleQueue()

    def put(self, event):
        self._events.put(event)

    def get(self, timeout=None):
        try:
            return self._events.get(timeout=timeout) if timeout != 0 else self._events.get_nowait()
        except queue.Empty:
            return None


class _Cancelled(BaseException):
    """Unwinds the plain loop; no code of the task's may catch it."""


class PlainJob:
    def __init__(self, pool, task, name, events):
        self.task, self.name, self.state = task, name, "queued"
        self._pool, self._events = pool, events
        self._answer = None
        self._result = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def proceed(self):
        self._say("proceed")

    def prune(self):
        self._say("prune")

    def cancel(self):
        self._say("cancel")

    def result(self, timeout=None):
        with self._changed:
            assert self._changed.wait_for(lambda: self._result is not None, timeout), f"{self.name} is {self.state}"
        return self._result

    def join(self):
        self._thread.join()

    def _say(self, answer):
        with self._changed:
            if self._answer != "cancel":
                self._answer = answer
            self._changed.notify_all()

    def _run(self):
        reports = []
        with self._pool.turn:
            try:
                self._check_cancelled()
                self.state = "running"
                trained = train_plain(self.task, lambda step, metrics: self._report(reports, step, metrics))
                result = PlainResult(
                    status=trained.status, metrics=trained.metrics, history=trained.history, trained=trained
                )
            except _Cancelled:
                result = PlainResult(status="cancelled", history=reports)
            except BaseException as error:  # noqa: BLE001 - goes into the result
                result = PlainResult(status="failed", error=error, history=reports)
        self._pool.jobs.discard(self)  # a pool keeps no weights of jobs that have ended
        self._end(result)

    def _end(self, result):
        with self._changed:
            self._result = result
            self.state = result.status
            self._changed.notify_all()
        if self._events is not None:
            self._events.put(Failed(job=self, result=result) if result.error else Finished(job=self, result=result))

    def _check_cancelled(self):
        with self._changed:
            if self._answer == "cancel":
                raise _Cancelled

    def _report(self, reports, step, metrics):
        reports.append({"step": step, **metrics})
        self._check_cancelled()
        if self._events is None:
            return True
        self._events.put(Reported(job=self, step=step, metrics=metrics))
        return self._wait() != "prune"

    def _wait(self):
        """Let the others compute until there is an answer."""
        streams = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - that stream
        self.state = "waiting"
        self._pool.turn.release()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._answer is not None)
                answer = self._answer
                if answer != "cancel":
                    self._answer = None
        finally:
            self._pool.turn.acquire()
        torch.set_rng_state(streams[0])
        np.random.set_state(streams[1])  # noqa: NPY002
        random.setstate(streams[2])
        self.state = "running"
        if answer == "cancel":
            raise _Cancelled
        return answer


class PlainPool:
    device_names = ("plain",)

    def __init__(self, *, max_concurrent=2):
        self.width = self.num_abreast = self.num_abreast_alone = max_concurrent
        self.fusion_size, self.admission = 0, "eager"
        self.turn = threading.Lock()
        self.jobs = set()
        self._submitted = 0
        self._opening = threading.Lock()
        self._shut = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()

    def events(self):
        self._check_open()
        return PlainStream()

    def submit(self, task, name=None, events=None, *, priority=0):
        with self._opening:
            self._check_open()
            job = PlainJob(self, task, name or f"job {self._submitted}", events)
            self._submitted += 1
            self.jobs.add(job)
            job.start()
        return job

    def run(self, tasks):
        return [job.result() for job in [self.submit(task) for task in tasks]]

    def shutdown(self):
        with self._opening:
            self._shut = True
            jobs = list(self.jobs)
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.join()

    def _check_open(self):
        if self._shut:
            raise ConfigError("this executor is shut down; make another one")
