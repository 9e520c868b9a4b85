"""Runs tasks of the registry on a pool and says what was seen: the path each took, and whether its bits are the same."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hydra_tune import HydraExecutor, Result
from hydra_tune.errors import CaptureError
from hydra_tune.shard import library
from hydra_tune.task import TrainTask
from tests.parity import reference
from tests.parity.exact import differences, without_seconds
from tests.parity.registry import Spec, build
from tests.support.forked import forked
from tests.support.tracker import StorageTracker

REFERENCE_SECONDS = 280


@dataclass(slots=True)
class Seen:
    """What was seen of one task: shards per mode (1 and a reason where it ran whole), and its result."""

    result: Result
    shards: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


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
    tasks = [build(spec) for spec in specs]
    tracker = StorageTracker()
    with _watched_plans() as plans, HydraExecutor(instrument=tracker, **options) as pool:
        results = pool.run(tasks)
        devices = pool.stats().devices.values()
    seen = sorted(tracker.peak_bytes, reverse=True)
    counted = sorted((device.peak_bytes for device in devices), reverse=True)
    assert seen or all(result.status == "failed" for result in results), [result.error for result in results]
    for tracked, ledger in zip(seen, counted, strict=False):
        assert tracked <= ledger <= max(device.budget_bytes for device in devices), (seen, counted)
    return [Seen(result, *plans.get(id(task), ({}, {}))) for task, result in zip(tasks, results, strict=True)]


def difference(seen: Seen, expected: dict[str, Any]) -> list[str]:
    """What of a completed task is not the reference's, to the last bit."""
    actual = {
        "history": without_seconds(seen.result.history),
        "state": dict(seen.result.state_dict()),
        "optimizer": seen.result.optimizer_state_dict(),
    }
    return list(differences({key: expected[key] for key in actual}, actual))


@contextmanager
def _watched_plans() -> Iterator[dict[int, tuple[dict[str, int], dict[str, str]]]]:
    """By task: the fewest shards of its plans for each mode, and why a plan is a whole one."""
    found: dict[int, tuple[dict[str, int], dict[str, str]]] = {}
    prepare = library.PlanLibrary.prepare
    whole = library.whole_plan

    def watched(
        self: Any, task: TrainTask, model: Any, optimizer: Any, batch: Any, mode: str, *rest: Any, **more: Any
    ) -> Any:
        prepared = prepare(self, task, model, optimizer, batch, mode, *rest, **more)
        shards, _ = found.setdefault(id(task), ({}, {}))
        shards[mode] = min(shards.get(mode, 1 << 30), 0 if prepared.plan.eager else len(prepared.plan.shards))
        return prepared

    def reasoned(
        task: TrainTask, model: Any, twin: Any, leaves: Any, mode: str, *, reason: CaptureError, **rest: Any
    ) -> Any:
        found.setdefault(id(task), ({}, {}))[1].setdefault(mode, str(reason))
        return whole(task, model, twin, leaves, mode, reason=reason, **rest)

    with mock.patch.object(library.PlanLibrary, "prepare", watched), mock.patch.object(library, "whole_plan", reasoned):
        yield found
