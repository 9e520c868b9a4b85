"""A cluster on a virtual clock: 10,000 trials under ASHA on 64 nodes of 8 devices, spread by `hydra_tune_ray.node.balance`.

python benchmarks/ray_scale.py [--nodes 64] [--devices 8] [--trials 10000] [--spread 4] [--abreast 2,8,20] [--driver-ms 0,5,50]

Simulated, not measured. A trial's epochs follow one another on one device at a time; a node's free device takes, of the
trials that wait there, the one that has the most left. Each report is handled by one driver, one after the other, each for
`--driver-ms`, and by ASHA; its trial waits meanwhile. Trials are admitted as others end, as many as `--abreast` times the
devices; pools know how long a trial's epochs are when it comes. Every ten seconds the directory moves trials, as in a cluster,
at their next report, for `--move` seconds each.

"At most": utilisation, if the longest trial began at once and all devices were busy until it ended, or longer. "When admitted":
the most that any spreading could reach with trials admitted when they were: had none ever waited for a device from then on.
"""

import argparse
import bisect
import heapq
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "integrations")]

from hydra_tune_ray.node.balance import PoolBacklog, least_busy, moves  # noqa: E402 - found by the lines before

GRACE, FACTOR, BALANCE_SECONDS = 1, 3, 10.0


@dataclass(slots=True)
class Trial:
    """One trial, and how good it is."""

    key: str
    epoch_seconds: float
    quality: float
    done: int = 0
    begun: float = 0.0
    node: str = ""
    target: str | None = None


@dataclass(slots=True)
class Node:
    """A pool: free devices, and what waits for them."""

    free: int
    waiting: list[tuple[float, str]] = field(default_factory=list)
    trials: set[str] = field(default_factory=set)
    left: float = 0.0


class Simulation:
    """One run of the cluster, to its end."""

    def __init__(self, options, driver_seconds, *, balances=True):
        self.options, self.driver_seconds, self.balances = options, driver_seconds, balances
        draw = random.Random(0)
        self.trials = {
            f"t{number}": Trial(f"t{number}", options.epoch * options.spread ** draw.uniform(-0.5, 0.5), draw.random())
            for number in range(options.trials)
        }
        self.pending = list(reversed(self.trials))
        self.nodes = {f"n{number}": Node(options.devices) for number in range(options.nodes)}
        self.rungs = {GRACE * FACTOR**level: [] for level in range(9) if GRACE * FACTOR**level < options.epochs}
        self.events, self.count = [], 0
        self.now = self.driver_free = self.driver_busy = self.busy = self.moved = 0.0
        self.busy_before_tail, self.tail = 0.0, None

    def _at(self, time, what, *args):
        self.count += 1
        heapq.heappush(self.events, (time, self.count, what, args))

    def run(self):
        """Play it to the end of the last trial."""
        abreast = int(self.options.abreast * self.options.nodes * self.options.devices)
        for _ in range(min(abreast, len(self.pending))):
            self._admit()
        self._at(BALANCE_SECONDS, self._balance)
        while self.events:
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
        return self

    def _left(self, trial):
        return trial.epoch_seconds * (self.options.epochs - trial.done)

    def _works(self):
        return {
            name: PoolBacklog(
                num_devices=self.options.devices,
                trials={key: self._left(self.trials[key]) for key in node.trials},
                started={key for key in node.trials if self.trials[key].done},
            )
            for name, node in self.nodes.items()
        }

    def _admit(self):
        if not self.pending:
            self.tail = self.tail or (self.now, self.busy)
            return
        trial = self.trials[self.pending.pop()]
        trial.begun = self.now
        # As the directory: the fewest seconds for each device; kept as sums here, not added up for each trial.
        loads = {
            name: PoolBacklog(num_devices=self.options.devices, trials={"all": node.left})
            for name, node in self.nodes.items()
        }
        self._arrive(trial, least_busy(loads, self._left(trial)))

    def _arrive(self, trial, name):
        node = self.nodes[name]
        trial.node, trial.target = name, None
        node.trials.add(trial.key)
        node.left += self._left(trial)
        heapq.heappush(node.waiting, (-self._left(trial), trial.key))
        self._start(node)

    def _start(self, node):
        while node.free and node.waiting:
            _, key = heapq.heappop(node.waiting)
            node.free -= 1
            seconds = self.trials[key].epoch_seconds
            self._at(self.now + seconds, self._report, self.trials[key])

    def _report(self, trial):
        node = self.nodes[trial.node]
        self.busy += trial.epoch_seconds
        trial.done += 1
        node.left -= trial.epoch_seconds
        node.free += 1
        self._start(node)
        begin = max(self.now, self.driver_free)
        self.driver_free = begin + self.driver_seconds
        self.driver_busy += self.driver_seconds
        self._at(self.driver_free, self._decide, trial)

    def _decide(self, trial):
        node = self.nodes[trial.node]
        if self._ends(trial):
            self._leave(trial, node)
            self._admit()
        elif trial.target is not None:
            self._leave(trial, node)
            self.moved += 1
            self._at(self.now + self.options.move, self._arrive, trial, trial.target)
        else:
            heapq.heappush(node.waiting, (-self._left(trial), trial.key))
            self._start(node)

    def _leave(self, trial, node):
        node.trials.discard(trial.key)
        node.left -= self._left(trial)

    def _ends(self, trial):
        if trial.done >= self.options.epochs:
            return True
        rung = self.rungs.get(trial.done)
        if rung is None:
            return False
        bisect.insort(rung, trial.quality)
        return trial.quality < rung[-max(1, len(rung) // FACTOR)]

    def _balance(self):
        if self.balances:
            for key, target in moves(self._works(), self.options.move).items():
                self.trials[key].target = target
        if any(node.trials for node in self.nodes.values()) or self.pending:
            self._at(self.now + BALANCE_SECONDS, self._balance)


def shown(done, options, label):
    """A line of the table."""
    num_devices = options.nodes * options.devices
    tail_at, tail_busy = done.tail or (done.now, done.busy)
    before = tail_busy / (tail_at * num_devices) if tail_at else 0.0
    longest = max(trial.done * trial.epoch_seconds for trial in done.trials.values())
    bound = max(longest, done.busy / num_devices)
    alone = max(trial.begun + trial.done * trial.epoch_seconds for trial in done.trials.values())
    unwaited = max(alone, done.busy / num_devices)
    print(
        f"{label:>9}  {done.now / 3600:5.2f}  {done.busy / done.now / num_devices:11.1%}  "
        f"{done.busy / bound / num_devices:7.1%}  {done.busy / unwaited / num_devices:13.1%}  "
        f"{before:27.1%}  {done.driver_busy / done.now:11.1%}  "
        f"{int(done.moved):5}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("nodes", 64), ("devices", 8), ("trials", 10_000), ("epochs", 27)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--epoch", type=float, default=60.0, help="seconds of a typical epoch")
    parser.add_argument("--spread", type=float, default=4.0, help="the longest epochs, in shortest ones")
    parser.add_argument("--abreast", default="2,8,20", help="trials in flight for each device")
    parser.add_argument("--move", type=float, default=5.0, help="seconds that moving a trial takes")
    parser.add_argument("--driver-ms", default="0,2,5,10,20,50,100")
    options = parser.parse_args()
    print(
        f"{options.trials} trials, {options.nodes} nodes x {options.devices} devices, epochs of about {options.epoch:g} s, "
        f"the longest {options.spread:g} times the shortest"
    )
    heads = "  hours  utilisation  at most  when admitted  until the last trial began  driver busy  moved"
    *fewer, widest = [float(text) for text in options.abreast.split(",")]
    print(f"in flight{heads}")
    for options.abreast in [*fewer, widest]:
        shown(Simulation(options, 0.005).run(), options, f"{options.abreast:g}")
    shown(Simulation(options, 0.005, balances=False).run(), options, "unmoved")
    print(f"driver ms{heads}")
    for text in options.driver_ms.split(","):
        shown(Simulation(options, float(text) / 1000).run(), options, text)


if __name__ == "__main__":
    main()
