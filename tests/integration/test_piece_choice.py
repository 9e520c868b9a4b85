"""`split_batches="auto"`: the number that is chosen, what becomes possible by it, and that it is no more than that number."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.errors import BudgetError, TaskError
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.loop.microbatch_choice import piece_count
from tests.parity.exact import differences
from tests.parity.test_splitting import Shaped
from tests.support import checkpointed
from tests.unit.pool.tasks import against_plain, running
from tests.unit.pool.tasks import task as small
from tests.unit.shard.bench import vectors

pytestmark = pytest.mark.usefixtures("captured_once")

WIDTH, DEPTH, ROWS = 64, 3, 1024
TOO_LITTLE = "600KiB"  # for whole batches, however the model is cut
TIGHT = "1.5MiB"  # whole batches fit, in shards; and pieces without
SLOW = {"link_bandwidth": "10MB/s"}  # copies are next to all there is


def net(noise=0.0):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(noise)) for _ in range(DEPTH)))


def task(count="auto", rows=ROWS, **changes):
    return TrainTask(
        **{
            "model": net,
            "optimizer": partial(torch.optim.AdamW, lr=1e-2),
            "loss": functional.mse_loss,
            "train": lambda: [vectors(rows, WIDTH)] * 3,
            "activations": "recompute",
            "split_batches": count,
            "seed": 3,
        }
        | changes
    )


def cut_for(budget_bytes, **options):
    return PlanLibrary(ShardPlanConstraints(budget_bytes=budget_bytes, buffer_fraction=0.0, alignment=64, **options))


def pool_of(device_memory=TOO_LITTLE, **changes):
    return running(**({"devices": "cpu:1", "device_memory": device_memory, "max_concurrent": 1} | changes))


def test_pieces_are_no_remedy_where_a_layer_normalizes_over_the_batch():
    with pool_of() as pool:
        (refused,) = pool.run([task(1, model=lambda: nn.Sequential(net(), nn.BatchNorm1d(WIDTH)))], on_error="return")
    assert "lower batch_size, or raise device_memory" in str(refused.error)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("num_shards", "cut"), [(None, 2), ("tuned", 3)])
def test_a_batch_that_does_not_fit_trains_in_the_fewest_pieces_and_all_say_how_many(num_shards, cut, caplog):
    with pool_of(num_shards=num_shards) as pool:
        (refused,) = pool.run([task(1)], on_error="return")
        with caplog.at_level(logging.INFO, CHOICES.name):
            (planned,) = pool.plan([task()]).trials
            (result,) = pool.run([task()])
    assert isinstance(refused.error, BudgetError)
    assert "lower batch_size, have batches split (split_batches='auto'), or raise device_memory" in str(refused.error)
    assert result.split_batches == planned.split_batches == 4
    assert planned.split.startswith(f"4 pieces of each batch of 1024: a step in {cut} shards moves about ")
    assert [record.getMessage() for record in caplog.records].count(planned.split) == 2
    assert against_plain(task(4), result) == []
    with pool_of(num_shards=num_shards) as pool:
        (fewer,) = pool.run([task(2)], on_error="return")
    assert isinstance(fewer.error, BudgetError)
    assert "split_batches" not in str(fewer.error), "its number is its own"


@pytest.mark.cases(1 / 3)
def test_a_batch_that_fits_is_split_where_that_makes_a_step_shorter():
    with pool_of(TIGHT, **SLOW) as pool:
        whole, split = (pool.plan([task(count)]) for count in (1, "auto"))
        (result,) = pool.run([task()])
    assert whole.trials[0].num_shards > split.trials[0].num_shards == 1
    assert whole.bytes_by_kind["boundaries"] > 0
    assert set(split.bytes_by_kind) == {"inputs"}
    assert result.split_batches == 4
    assert "whole batches would take longer" in split.trials[0].split
    assert whole.trials[0].split is None
    assert against_plain(task(4), result) == []


@pytest.mark.slow
def test_slower_copies_make_for_more_pieces():
    counts = []
    for options in ({}, SLOW):
        with pool_of(**options) as pool:
            counts.append(pool.plan([task()]).trials[0].split_batches)
    assert counts == [4, 16]


def test_a_model_that_stays_on_the_device_has_whole_batches():
    with pool_of("8MiB") as pool:
        (result,) = pool.run([task()])
    assert result.split_batches == 1
    assert against_plain(task(1), result) == []


CHANGES = {
    "several batches, clipped, with dropout": {"accumulate": 2, "max_grad_norm": 0.1, "model": partial(net, 0.2)},
    "kept": {"activations": "keep"},
    "half precision": {"precision": "float16", "report_every": 2},
    "in turn with evaluations": {"validate": lambda: [vectors(32, WIDTH)] * 2, "epochs": 2},
    "with smaller batches": {"train": lambda: [vectors(rows, WIDTH) for rows in (ROWS, 1021, 3)]},
}


SLOW_CHANGES = ("half precision", "in turn with evaluations")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_CHANGES else name for name in CHANGES]
)
def test_the_numbers_are_those_of_the_number_that_was_chosen(name):
    with pool_of(devices="cpu:2", optimizer_placement="host" if name == "kept" else "device") as pool:
        (result,) = pool.run([task(**CHANGES[name])])
    assert result.error is None
    assert result.split_batches > 1
    assert against_plain(task(result.split_batches, **CHANGES[name]), result) == []


@pytest.mark.cases(1 / 3)
def test_where_no_piece_fits_it_is_refused_with_a_budget_that_would_do():
    with pool_of("40KiB") as pool, pytest.raises(BudgetError) as refusal:
        pool.plan([task(rows=128)])
    assert str(refusal.value).startswith(
        "split_batches='auto': batches of 128 do not fit, not even in pieces of one sample; "
    )
    with pool_of(refusal.value.enough_bytes) as pool:
        (result,) = pool.run([task(rows=128)])
    assert result.split_batches > 1
    assert against_plain(task(result.split_batches, rows=128), result) == []


@pytest.mark.cases(1 / 3)
def test_trials_that_are_alike_look_for_it_once(monkeypatch):
    asked = []
    foresee = PlanLibrary.foresee
    monkeypatch.setattr(PlanLibrary, "foresee", lambda self, *args: (asked.append(args[0]), foresee(self, *args))[1])
    with pool_of() as pool:
        pool.plan([task()])
        numbers = [one.split_batches for one in asked]
        assert numbers == sorted(set(numbers))
        results = pool.run([task(seed=seed, optimizer=partial(torch.optim.AdamW, lr=10.0**-seed)) for seed in range(3)])
        assert len(asked) == len(numbers)
        pool.plan([task(accumulate=2)])
        assert len(asked) > len(numbers)
    assert [result.split_batches for result in results] == [4, 4, 4]


def test_what_was_looked_at_is_not_captured_again(monkeypatch):
    captured = []
    capture = PlanLibrary._measured_step

    def counted(self, request, answers):
        captured.append(request.leaves.signature)
        return capture(self, request, answers)

    monkeypatch.setattr(PlanLibrary, "_measured_step", counted)
    with pool_of() as pool:
        (result,) = pool.run([task()])
    assert result.split_batches == 4
    assert len(captured) == len(set(captured)) > 2


@pytest.mark.cases(1 / 3)
def test_a_model_without_bytes_is_split_alike(monkeypatch):
    """And what can be told of it without a run is refused."""
    with pool_of() as pool:
        built = pool.plan([task()])
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_BUILT_BYTES", 1 << 10)
    monkeypatch.setattr("hydra_tune.shard.capture.meta_models._SMALL_BYTES", 1 << 9)
    with pool_of() as pool:
        unbuilt = pool.plan([task()])
        assert not unbuilt.trials[0].is_checked
        with pytest.raises(TaskError, match="split_batches='auto' would change the statistics of '0'"):
            pool.plan([task(model=lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), net()))])
    assert unbuilt.trials[0].split == built.trials[0].split
    assert unbuilt.bytes_by_kind["parameters"] > 0


def test_no_speed_is_measured_for_it():
    """It would be another number each time, and other bits."""

    def measured():
        raise AssertionError("a clock was asked")

    library = cut_for(600 << 10, optimizer_placement="auto", speeds=measured)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    choice = piece_count(task(), library, module, optimizer, vectors(ROWS, WIDTH))
    assert choice.count > 1
    assert all(one is None or one.seconds is None for _, one in choice.tried), "nothing is known of this link"


@pytest.mark.cases(1 / 3)
def test_a_model_that_cannot_be_cut_is_split_as_well():
    """24 KiB: its activations for whole batches do not fit, even spilled."""
    described = partial(small, model=Shaped, batch_size=24)
    with running(device_memory="24KiB") as pool:
        (result,) = pool.run([described(split_batches="auto")])
    assert result.error is None
    assert against_plain(described(split_batches=result.split_batches), result) == []


def test_a_trial_that_goes_on_elsewhere_keeps_its_number():
    """Where there is room for whole batches, another number would change its last bits."""
    keeper = checkpointed.Collector()
    expected = checkpointed.run(task(report_every=1), cut_for(600 << 10), keeper)
    (count,) = {saved.facts["split_batches"] for saved in keeper.saved}
    assert count > 1
    for saved in keeper.saved[:2]:
        found = checkpointed.run(task(report_every=1), checkpointed.library(), beginning=StartCheckpoint(saved=saved))
        assert list(differences(expected, found)) == []
    anew = checkpointed.run(task(report_every=1), checkpointed.library())
    assert list(differences(expected, anew)) != []
