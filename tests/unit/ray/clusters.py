"""A cluster on a virtual clock that the real directory spreads trials over: pools of one device that run the longest first."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from hydra_tune_ray.messages import PoolLoadReport
from hydra_tune_ray.node.nodes import DeviceNode
from hydra_tune_ray.node.pool_directory import DirectoryOptions, PoolDirectory

PULSE, SLICE = 0.5, 0.05


@dataclass
class Trial:
    """One trial: `epochs` reports, each after so many slices of compute."""

    key: str
    epochs: int
    epoch_slices: int
    done: int = 0
    slices: float = 0
    begins: float = 0.0
    waits: float = 0.0
    target: str | None = None

    @property
    def begun(self):
        """Whether it has a state."""
        return self.done or self.slices

    @property
    def left(self):
        """Seconds."""
        return ((self.epochs - self.done) * self.epoch_slices - self.slices) * SLICE


@dataclass
class Pool:
    """A node of one device; its steps seem to take `noise` times what they do, another number at each pulse."""

    node: DeviceNode
    speed: float
    trials: dict[str, Trial] = field(default_factory=dict)
    busy: float = 0.0
    ended: float = 0.0
    moved: int = 0


class Cluster:
    """See the module.

    Args:
        count: of nodes.
        gap: seconds between the trials' processes.
        build: seconds to build a trial in a pool.
        move: seconds from its report to where it goes.
        answer: seconds from a report to its answer.
        noise: the most by which a pool's times are wrong at a pulse, as a factor.
        speeds: of the nodes; 1 for all.
        seed: of the noise.
    """

    def __init__(
        self, monkeypatch, *, count, gap=0.3, build=0.5, move=0.5, answer=0.02, noise=1.0, speeds=None, seed=0
    ):
        self.now, self.events, self.order = 100.0, [], itertools.count()
        self.gap, self.build, self.move, self.answer, self.noise = gap, build, move, answer, noise
        self.random = random.Random(seed)
        monkeypatch.setattr("hydra_tune_ray.node.pool_directory.time.monotonic", lambda: self.now)
        monkeypatch.setattr(PoolDirectory, "_watch_nodes", lambda directory: None)  # asks Ray
        self.directory = PoolDirectory(DirectoryOptions(name="pools", options={}, start_seconds=1.0, idle_seconds=None))
        self.pools = {}
        for number in range(count):
            self.join(f"n{number}", (speeds or [1.0] * count)[number])

    def join(self, name, speed=1.0):
        """A node."""
        node = DeviceNode(node_id=name, devices="cpu:1", num_gpus=0, num_devices=1)
        self.pools[name] = Pool(node, speed)
        self._at(self.now + self.random.uniform(0, PULSE), self._pulse, name)
        self._at(self.now, self._run, name)

    def run(self, trials, joins=()):
        """Play it to the end of all of them.

        Args:
            trials: the epochs of each, and the seconds of one.
            joins: nodes that come later, so many seconds after the first trial.

        Returns:
            Seconds from the first trial's coming to the last one's end.
        """
        start = self.now + 1.0
        for number, (epochs, seconds) in enumerate(trials):
            self._at(start + number * self.gap, self._come, Trial(f"t{number:02}", epochs, round(seconds / SLICE)))
        for after, name in joins:
            self._at(start + after, self.join, name)
        self.pending = len(trials)
        while self.pending:
            assert self.now < 2000, [(n, p.trials) for n, p in self.pools.items()]
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
        return self.now - start

    def _at(self, when, what, *args):
        heapq.heappush(self.events, (when, next(self.order), what, args))

    def _come(self, trial):
        name = answered(self.directory.place(trial.key, "nowhere", 1.0))
        self._arrive(trial, name)

    def _arrive(self, trial, name):
        trial.begins, trial.target, trial.waits = self.now + self.build, None, 0.0
        self.pools[name].trials[trial.key] = trial

    def _leave(self, pool, trial):
        del pool.trials[trial.key]
        pool.moved += 1
        self._at(self.now + (self.move if trial.begun else 0.0), self._arrive, trial, trial.target)

    def _pulse(self, name):
        pool = self.pools[name]
        error = self.noise ** self.random.uniform(-1, 1)
        left, epochs = {}, {}
        for trial in pool.trials.values():
            known = trial.done and trial.begins <= self.now
            left[trial.key] = trial.left / pool.speed * error if known else None
            epochs[trial.key] = trial.epochs - trial.done - trial.slices / trial.epoch_slices
        there = [t.key for t in pool.trials.values() if t.target is None]
        leaving = {t.key: (t.target, left[t.key]) for t in pool.trials.values() if t.target is not None}
        load = PoolLoadReport(
            node=pool.node,
            trials={key: left[key] for key in there},
            started=frozenset(key for key in there if pool.trials[key].begun),
            leaving=leaving,
            epochs=epochs,
        )
        for key, target in answered(self.directory.pulse(name, load, None)).items():
            trial = pool.trials.get(key)
            if trial is not None:
                trial.target = target
                if not trial.begun:
                    self._leave(pool, trial)
        self._at(self.now + PULSE, self._pulse, name)

    def _run(self, name):
        """A slice of the device's time."""
        pool = self.pools[name]
        ready = [t for t in pool.trials.values() if t.begins <= self.now and t.waits <= self.now]
        if ready:
            trial = max(ready, key=lambda t: (t.target is not None, t.left, t.key))
            trial.slices += pool.speed
            pool.busy += SLICE
            pool.ended = self.now + SLICE
            if trial.slices >= trial.epoch_slices:
                trial.slices, trial.done = 0, trial.done + 1
                trial.waits = self.now + SLICE + self.answer
                if trial.done == trial.epochs:
                    del pool.trials[trial.key]
                    self.pending -= 1
                elif trial.target is not None:
                    self._leave(pool, trial)
        self._at(self.now + SLICE, self._run, name)


def answered(call):
    """What a coroutine returns that waits for nobody."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")
