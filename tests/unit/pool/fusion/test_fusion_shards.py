"""What goes together where a model is one shard, and not where it is several: the log says so, and the numbers are the same."""

from functools import partial

import pytest
from torch.nn import functional

from tests.unit.pool.fusion.test_fused_pool import assert_as_plain, scaled, task
from tests.unit.pool.tasks import running

pytestmark = pytest.mark.usefixtures("captured_once")

smooth = partial(functional.cross_entropy, label_smoothing=0.1)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_other_batch_sizes(num_shards, caplog):
    """Members of several shards take turns."""
    model = partial(scaled, 16, 1.0)
    tasks = [task(seed, model=model, batch_size=size, epochs=2) for seed, size in enumerate((8, 6))]
    with (
        running(fusion="on", fusion_size=2, num_shards=num_shards) as pool,
        caplog.at_level("INFO", "hydra_tune.fusion"),
    ):
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)
    assert {(result.group_size, result.num_shards) for result in results} == {(2, num_shards)}
    turns = [line for line in caplog.messages if "take turns" in line]
    assert bool(turns) == (num_shards == 2)
    assert all("shards" in line for line in turns)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_other_losses(num_shards, caplog):
    """Trials of several shards are not computed together."""
    tasks = [
        task(seed, model=partial(scaled, 16, 1.0), loss=loss, epochs=2)
        for seed, loss in enumerate((functional.cross_entropy, smooth))
    ]
    with (
        running(fusion="on", fusion_size=2, num_shards=num_shards) as pool,
        caplog.at_level("INFO", "hydra_tune.fusion"),
    ):
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)
    assert {(result.group_size, result.num_shards) for result in results} == {(3 - num_shards, num_shards)}
    why = "losses and metrics may be a member's own where a model is one shard"
    assert any(why in line for line in caplog.messages) == (num_shards == 2)
