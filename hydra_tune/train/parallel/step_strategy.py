"""Arrangement of the batches of a trial's next optimizer step, decided anew for each step by the pool's present offer.

`SingleTrial` (`train/single_trial.py`) calls `arrange` once the first of several batches of a step has been drawn.
`TrialRehearsal` (`train/timing/fake_trial.py`) asks for the `exact_ways`, for a forecast. A strategy may name only devices of
the offer.
"""

from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.task import Parallel
from hydra_tune.train.loop.plan_cache import CachedPlan
from hydra_tune.train.parallel import batch_grouping
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, GROUPED, ONE_DEVICE, PIPELINED, fastest, shard_facts
from hydra_tune.train.parallel.pipeline_parallel import may_pipeline
from hydra_tune.train.parallel.pool_offers import DeviceLender, StepStrategy, lane_bytes
from hydra_tune.train.state.model_state import ModelState


def arrange(
    kept: CachedPlan, state: ModelState, helpers: DeviceLender, count: int, parallel: Parallel
) -> StepStrategy | None:
    """Arrange how the `count` batches or pieces of a step run together; None: one after the other."""
    plan = kept.plan
    if kept.ways is None:
        kept.ways = exact_ways(plan, state)
    offer = helpers.offer() if parallel != "none" and set(kept.ways) - {GROUPED} else None
    if offer is not None:
        best = fastest(shard_facts(plan, kept.times), count, offer, kept.ways, parallel)
        if best.way != ONE_DEVICE:
            max_batches = offer.most_devices if best.way == DATA_PARALLEL else 2 * len(offer.devices)
            together = best.is_dealt or best.teams > 0
            if together:
                # All batches at once: fewer would load each shard again for every few batches.
                max_batches = count
            width = helpers.ask(best.way, lane_bytes(plan, best.way, together=together), min(count, max_batches))
            strategy = StepStrategy(
                way=best.way, width=width, plan=plan, homes=best.homes, is_dealt=best.is_dealt, teams=best.teams
            )
            return strategy if width > 1 else None
    # No further device helps: batches of one device go through each shard together where the host has room.
    way = GROUPED if GROUPED in kept.ways else ONE_DEVICE
    width = helpers.ask(way, lane_bytes(plan, way), count if way == GROUPED else 1)
    return StepStrategy(way=way, width=width, plan=plan) if width > 1 else None


def exact_ways(plan: ShardPlan, state: ModelState) -> list[str]:
    """Return the ways to run several batches of a step with equal bits; groups only where they save bytes."""
    ways = [DATA_PARALLEL] if plan.may_run_beside else []
    if may_pipeline(plan, state):
        ways.append(PIPELINED)
    if plan.may_be_pipelined and batch_grouping.is_worth_it(plan):
        ways.append(GROUPED)
    return ways
