"""Trials run by hand on one device, saved between two steps and gone on with by another: no pool, no files, no threads."""

import json
from typing import Any

from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.task import TrainTask
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.single_trial import SingleTrial


class Collector:
    """Saves a trial after each of its steps, and at reports."""

    def __init__(self) -> None:
        self.saved: list[CheckpointContent] = []
        self.every_steps, self.path = 1, None

    def begins(self, python_state) -> None:
        """A trial by hand begins again with functions of its own."""

    def reached(self, trial, *, steps, at_report, is_last) -> None:
        found = trial.snapshot().copied({"steps": steps, "at_report": at_report})
        facts = json.loads(json.dumps(found.facts, allow_nan=False))
        self.saved.append(CheckpointContent(facts=facts, tensors=found.tensors, labels=found.labels))


def library(**options: Any) -> PlanLibrary:
    """Makes plans for a device that has room for all; to be shared by trials that are alike, which makes them quick."""
    return PlanLibrary(ShardPlanConstraints(budget_bytes=64 * 2**20, buffer_fraction=0.0, alignment=64, **options))


def run(
    task: TrainTask, plans: PlanLibrary, keeper: Any = None, beginning: StartCheckpoint | None = None
) -> dict[str, Any]:
    """Train to the end; returns all that has to be the same."""
    device = CpuDevice(0, 64 * 2**20)
    pager = Pager(device)
    trial = SingleTrial(task, plans, device, keeper=keeper, beginning=beginning)
    try:
        with device.worker():
            while (step := trial.advance()) is not None:
                if isinstance(step, PendingUnit):
                    run_unit(step, device, pager, None)
        module, optimizer = trial.module, trial.optimizer
        trial.close(keep=True)
    finally:
        device.close()
    assert module is not None
    assert optimizer is not None
    history = [{key: value for key, value in entry.items() if key != "seconds"} for entry in trial.history]
    return {
        "state": dict(module.state_dict()),
        "optimizer": optimizer.state_dict(),
        "history": history,
        "metrics": trial.metrics,
    }
