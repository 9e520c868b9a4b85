"""Profiles of tasks for the simulator, from their plans and the times of the plans' checks, without training.

`Pool.profile` (`pool/pool.py`) makes the profile when a program calls `HydraExecutor.profile`; `hydra-tune simulate`
reads such profiles. One thread, made for the call, builds the models, like the pool's preparer. The pool's jobs may run
meanwhile, and the module touches none of them. Each trial captures its step, and never runs the user's own step in place
of a plan (`may_run_own_code=False`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hydra_tune.devices.device import Device
from hydra_tune.devices.single_thread import SingleThreadExecutor
from hydra_tune.errors import ConfigError
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.simulate.model import PROFILE_FORMAT
from hydra_tune.task import TrainTask
from hydra_tune.train.parallel import batch_grouping
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.timing.unit_times import UnitTimes


def planned_profile(
    tasks: Mapping[str, TrainTask],
    library: PlanLibrary,
    devices: Sequence[Device],
    *,
    max_concurrent: int,
    bandwidth: float | None,
    steps: int | None,
) -> dict[str, Any]:
    """Return the content of a profile; see `HydraExecutor.profile`."""
    # On a thread of its own with one intra-op thread, like the preparer, so the caller's torch settings stay untouched.
    with SingleThreadExecutor("hydra-plan", partial(torch.set_num_threads, 1)) as thread:
        trials = [
            thread.submit(partial(_planned_trial, name, task, library, devices[0], steps)).result()
            for name, task in tasks.items()
        ]
    return {
        "format": PROFILE_FORMAT,
        "trials": trials,
        "devices": [{"name": d.name, "memory_bytes": d.budget_bytes, "bandwidth": bandwidth} for d in devices],
        "max_concurrent": max_concurrent,
        "overlap": library.budget.sends_ahead,  # whether devices prefetch the next unit's blocks
    }


def _planned_trial(
    name: str, task: TrainTask, library: PlanLibrary, device: Device, steps: int | None
) -> dict[str, Any]:
    trial = SingleTrial(task, library, device, may_run_own_code=False)
    try:
        trial.advance()  # builds the model, draws a batch, and makes the plan
        assert trial.state is not None
        plan = trial.state.layout.plan
        num_steps = trial.progress.num_steps if steps is None else steps
        if plan.eager:
            raise ConfigError(
                f"{name} runs whole, and the times of its units are unknown before a run; record one "
                "(HydraExecutor(record=True)) and use its recorded_profile"
            )
        if num_steps is None:
            raise ConfigError(f"the number of steps of {name} is unknown before its data has been read; give steps=")
        parts = trial.task.accumulate * trial.task.num_pieces
        knows_draws = library.budget.counts_draws or not plan.is_stochastic
        together = parts if knows_draws and plan.may_be_pipelined and batch_grouping.is_worth_it(plan) else 1
        sizes = [
            shard.cost.state_bytes + (0 if shard.cost.updates_on_host else shard.cost.optimizer_bytes)
            for shard in plan.shards
        ]
        return {
            "name": name,
            "steps": num_steps,
            "step": [*_units(plan, trial.unit_times, parts, together)],
            "shard_bytes": sizes,
        }
    finally:
        trial.close(keep=False)


def _units(plan: ShardPlan, times: UnitTimes, parts: int, together: int) -> Iterator[dict[str, Any]]:
    """Yield F0 .. F(K-2), B(K-1) .. B0, each `together` times, for all parts; the last part's B includes the shard's update.

    A shard without a backward has no B.
    """
    last = len(plan.shards) - 1
    for first in range(0, parts, together):
        for index in range(last):
            yield from [{"kind": "forward", "shard": index, "seconds": times.of(("forward", index))}] * together
        for index in range(last, -1, -1):
            if plan.shards[index].has_backward:
                for part in range(first, first + together):
                    update = times.of(("update", index)) if part == parts - 1 else 0.0
                    seconds = times.of(("backward", index)) + update
                    yield {"kind": "backward", "shard": index, "seconds": seconds}
