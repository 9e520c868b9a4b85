"""Runs tasks of the registry on a pool and says what was seen: the path each took, and whether its bits are the same."""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hydra_tune import HydraExecutor, Result
from hydra_tune.errors import CaptureError
from hydra_tune.pool.stats import DeviceStats
from hydra_tune.shard.partition import plan_cache
from hydra_tune.task import TrainTask
from hydra_tune.train.loop.direct import WholeModelRunner
from tests.parity import reference
from tests.parity.exact import differences, without_seconds
from tests.parity.registry import Spec, build
from tests.support.forked import forked
from tests.support.tracker import StorageTracker

REFERENCE_SECONDS = 280


@dataclass(slots=True)
class Way:
    """How one task was run.

    Attributes:
        shards: by mode, the fewest shards of a plan that was made for it; 0 where a plan is a whole one. Empty where all was
            run by the user's own code, for which no plan is made.
        reasons: by mode, why a plan is a whole one.
        own_batches: batches trained on by the user's own code.
    """

    shards: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    own_batches: int = 0


@dataclass(slots=True)
class Seen:
    """What was seen of one task: its result, and how it was run."""

    result: Result
    way: Way = field(default_factory=Way)


def reference_of(specs: Iterable[Spec]) -> dict[Spec, Any]:
    """What a plain loop gives for each, in a fresh process with one intra-op thread."""
    wanted = list(dict.fromkeys(specs))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "references.pt"
        forked(reference.main, output, *wanted, timeout=REFERENCE_SECONDS).check_returncode()
        found = torch.load(output, weights_only=True)
    return {spec: found[str(spec)] for spec in wanted}


def run(specs: list[Spec], **options: Any) -> list[Seen]:
    """Train on one pool, and hold what a tracker saw on each device against what the device's ledger counted."""
    tracker = StorageTracker()
    found, devices = trained(specs, instrument=tracker, **options)
    seen = sorted(tracker.peak_bytes, reverse=True)
    counted = sorted((device.peak_bytes for device in devices), reverse=True)
    assert seen or all(one.result.status == "failed" for one in found), [one.result.error for one in found]
    for tracked, ledger in zip(seen, counted, strict=False):
        assert tracked <= ledger <= max(device.budget_bytes for device in devices), (seen, counted)
    return found


def trained(specs: list[Spec], **options: Any) -> tuple[list[Seen], list[DeviceStats]]:
    """Train on one pool; what was seen of each task, and the figures of the devices."""
    tasks = [build(spec) for spec in specs]
    with watched_ways() as ways, HydraExecutor(**options) as pool:
        results = pool.run(tasks, on_error="return")
        devices = list(pool.stats().devices.values())
    return [Seen(result, ways[id(task)]) for task, result in zip(tasks, results, strict=True)], devices


def difference(seen: Seen, expected: dict[str, Any]) -> list[str]:
    """What of a completed task is not the reference's, to the last bit."""
    actual = {
        "history": without_seconds(seen.result.history),
        "state": dict(seen.result.state_dict()),
        "optimizer": seen.result.optimizer_state_dict(),
    }
    return list(differences({key: expected[key] for key in actual}, actual))


@contextmanager
def watched_ways() -> Iterator[dict[int, Way]]:
    """How tasks are run meanwhile, by a task's identity."""
    found: dict[int, Way] = defaultdict(Way)
    prepare = plan_cache.PlanLibrary.prepare
    whole = plan_cache.whole_plan
    train = WholeModelRunner.train

    def watched(
        self: Any, task: TrainTask, model: Any, optimizer: Any, batch: Any, mode: str, *rest: Any, **more: Any
    ) -> Any:
        prepared = prepare(self, task, model, optimizer, batch, mode, *rest, **more)
        shards = found[id(task)].shards
        shards[mode] = min(shards.get(mode, 1 << 30), 0 if prepared.plan.eager else len(prepared.plan.shards))
        return prepared

    def reasoned(
        task: TrainTask, model: Any, twin: Any, leaves: Any, mode: str, *, reason: CaptureError, **rest: Any
    ) -> Any:
        found[id(task)].reasons.setdefault(mode, str(reason))
        return whole(task, model, twin, leaves, mode, reason=reason, **rest)

    def counted(self: Any, batch: Any, share: float) -> Any:
        trained = train(self, batch, share)
        found[id(self._task)].own_batches += 1
        return trained

    with (
        mock.patch.object(plan_cache.PlanLibrary, "prepare", watched),
        mock.patch.object(plan_cache, "whole_plan", reasoned),
        mock.patch.object(WholeModelRunner, "train", counted),
    ):
        yield found
