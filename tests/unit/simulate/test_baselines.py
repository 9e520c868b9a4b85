"""Other kinds of parallelism, on cases worked out by hand."""

import itertools

import pytest

from benchmarks.baselines import (
    TrialCost,
    data_parallel_makespan,
    data_parallel_step_seconds,
    harmony_step,
    longest_first_makespan,
    model_parallel_makespan,
    model_parallel_step_seconds,
    pipeline_makespan,
    pipeline_step_seconds,
    task_parallel_makespan,
)
from hydra_tune.errors import ConfigError


def trial(**changes):
    """Three shards: 6 s forward, 12 s backward, 30 bytes across the first cut and 10 across the second."""
    given = {
        "num_steps": 2,
        "forward_seconds": (1.0, 2.0, 3.0),
        "backward_seconds": (2.0, 4.0, 6.0),
        "boundary_bytes": (30, 10),
        "parameter_bytes": (100, 400, 200),
    }
    return TrialCost(**{**given, **changes})


def equal_shards(num_shards, num_steps=1):
    return TrialCost(num_steps=num_steps, forward_seconds=(1.0,) * num_shards, backward_seconds=(2.0,) * num_shards)


def test_one_device_at_a_time():
    assert model_parallel_step_seconds(trial()) == 18.0
    assert model_parallel_step_seconds(trial(), bytes_per_second=10.0) == 18.0 + 2 * 40 / 10
    assert model_parallel_makespan([trial(), equal_shards(2)], 3, bytes_per_second=10.0) == 2 * 26.0 + 6.0
    assert trial().compute_seconds == 36.0


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 32])
def test_equal_stages_idle_as_the_formula_says(num_shards, num_microbatches):
    expected = (num_microbatches + num_shards - 1) / num_microbatches * 3.0
    assert pipeline_step_seconds(equal_shards(num_shards), num_microbatches=num_microbatches) == pytest.approx(expected)


def test_a_pipeline_of_one_microbatch_is_model_parallelism():
    for bytes_per_second in (1.0, 10.0, float("inf")):
        pipeline = pipeline_step_seconds(trial(), num_microbatches=1, bytes_per_second=bytes_per_second)
        assert pipeline == pytest.approx(model_parallel_step_seconds(trial(), bytes_per_second=bytes_per_second))


def test_an_uneven_pipeline():
    """Two microbatches, stages of .5, 1 and 1.5 s forward and twice that backward, without transfers.

    Forwards end at stage 0: .5, 1; stage 1: 1.5, 2.5; stage 2: 3, 4.5. Backwards from there at stage 2: 7.5, 10.5;
    stage 1: 9.5, 12.5; stage 0: 10.5, 13.5.
    """
    assert pipeline_step_seconds(trial(), num_microbatches=2) == 13.5


def test_a_pipeline_with_transfers():
    """The same at 10 bytes/s: a microbatch takes 1.5 s over the first cut and .5 s over the second.

    Forwards end at stage 0: .5, 1; stage 1: 3, 4; stage 2: 5, 6.5. Backwards at stage 2: 9.5, 12.5; stage 1: 12, 15;
    stage 0: 14.5, 17.5.
    """
    assert pipeline_step_seconds(trial(), num_microbatches=2, bytes_per_second=10.0) == 17.5
    makespan = pipeline_makespan([trial(), trial()], 3, num_microbatches=2, bytes_per_second=10.0)
    assert makespan == 4 * 17.5


def test_trials_in_groups_of_their_own_size():
    """Four devices: 3 of them for 10 s, the fourth for 6 s, then 2 for 4 s, as soon as two are free."""

    def lasting(seconds, num_shards):
        part = seconds / 3 / num_shards
        return TrialCost(num_steps=1, forward_seconds=(part,) * num_shards, backward_seconds=(2 * part,) * num_shards)

    trials = [lasting(4, 2), lasting(10, 3), lasting(6, 1)]
    assert task_parallel_makespan(trials, 4, own_groups=True) == pytest.approx(14)
    assert task_parallel_makespan(trials, 4) == pytest.approx(20)  # one group of three
    assert task_parallel_makespan(trials[:2], 5, own_groups=True) == pytest.approx(10)
    assert task_parallel_makespan([], 4, own_groups=True) == 0


def test_replicas_share_the_batch_and_sum_their_gradients():
    one = trial(num_steps=1)
    assert data_parallel_step_seconds(one, num_replicas=1, bytes_per_second=10.0) == 26.0
    assert data_parallel_step_seconds(one, num_replicas=2, bytes_per_second=10.0) == 13.0 + 400 / 10
    assert data_parallel_step_seconds(one, num_replicas=4, bytes_per_second=10.0) == 6.5 + 2 * 3 / 4 * 400 / 10
    assert data_parallel_step_seconds(one, num_replicas=4, sharded=True, bytes_per_second=10.0) == 6.5 + 90.0
    # 8 devices hold two replicas of three shards, and eight of one.
    assert data_parallel_makespan([one, one], 8, bytes_per_second=10.0) == 2 * 53.0
    assert data_parallel_makespan([equal_shards(1, num_steps=4)], 8) == 4 * 3.0 / 8


def test_whole_trials_side_by_side():
    """Two groups of three devices for trials of 36, 36 and 18 s: 36 + 18 in one of them."""
    assert task_parallel_makespan([trial(num_steps=1), trial(), trial()], 8) == 54.0
    assert task_parallel_makespan([equal_shards(1)] * 3, 2) == 6.0
    assert task_parallel_makespan([], 2) == 0.0


def test_grahams_worst_case():
    """Longest first takes 11 where 9 is best: 4/3 - 1/9 of it, which is as bad as it gets on three devices."""
    assert longest_first_makespan([5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0], 3) == 11.0


def test_more_shards_than_devices():
    message = "a trial has 3 shards, each on a device of its own, but there are 2 devices; cut it"
    for makespan in (model_parallel_makespan, task_parallel_makespan, data_parallel_makespan):
        with pytest.raises(ConfigError, match=message):
            makespan([trial()], 2)
    with pytest.raises(ConfigError, match=message):
        pipeline_makespan([trial()], 2, num_microbatches=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, not 0"),
        ({"forward_seconds": ()}, "forward_seconds is empty, expected the seconds of at least 1 shard"),
        ({"backward_seconds": (1.0,)}, "backward_seconds has 1 entries, expected 3 for 3 shards"),
        ({"boundary_bytes": (1, 1, 1)}, "boundary_bytes has 3 entries, expected 2 for 3 shards"),
        ({"parameter_bytes": (1,)}, "parameter_bytes has 1 entries, expected 3 for 3 shards"),
        ({"forward_seconds": (1.0, 0.0, 1.0)}, "forward_seconds must be positive, not 0.0"),
        ({"backward_seconds": (1.0, -1.0, 1.0)}, "backward_seconds must be positive, not -1.0"),
        ({"boundary_bytes": (1, -1)}, r"boundary_bytes must not be negative, not \(1, -1\)"),
    ],
)
def test_costs_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        trial(**changes)


def test_arguments_that_cannot_be():
    with pytest.raises(ConfigError, match=r"bytes_per_second must be positive, not 0\.0"):
        model_parallel_step_seconds(trial(), bytes_per_second=0.0)
    with pytest.raises(ConfigError, match="num_microbatches must be at least 1, not 0"):
        pipeline_step_seconds(trial(), num_microbatches=0)
    with pytest.raises(ConfigError, match="num_replicas must be at least 1, not 0"):
        data_parallel_step_seconds(trial(), num_replicas=0)
    with pytest.raises(ConfigError, match="num_devices must be at least 1, not 0"):
        model_parallel_makespan([], 0)
    with pytest.raises(ConfigError, match=r"job_seconds must be positive, not 0\.0"):
        longest_first_makespan([1.0, 0.0], 2)
    with pytest.raises(ConfigError, match="num_layers must be at least 1, not 0"):
        harmony_step(num_layers=0, num_devices=2, num_microbatches=2)
    with pytest.raises(ConfigError, match=r"task_seconds must be positive, not -1\.0"):
        harmony_step(num_layers=1, num_devices=1, num_microbatches=1, task_seconds=-1.0)


# Harmony's Figure 4 as its text tells it: rows are devices, columns are units of time, dots are idle. Layers count from
# 1 and microbatches are a and b, as in F1a; an update serves both.
HARMONY_FIGURE_4 = """
    F1a F1b F3a F3b ... ... B3a B3b U3  B1a B1b U1
    ... F2a F2b F4a F4b B4a B4b U4  B2a B2b U2  ...
"""


def as_rows(runs):
    end = max(int(run.end_seconds) for run in runs)
    rows = [["..."] * end for _ in range(1 + max(run.device for run in runs))]
    for run in runs:
        microbatch = "" if run.microbatch is None else "ab"[run.microbatch]
        rows[run.device][int(run.start_seconds)] = f"{run.kind[0].upper()}{run.layer + 1}{microbatch}"
    return rows


def test_harmonys_figure_4():
    runs = harmony_step(num_layers=4, num_devices=2, num_microbatches=2)
    assert as_rows(runs) == [line.split() for line in HARMONY_FIGURE_4.split("\n") if line.strip()]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_harmonys_swaps_are_three_times_the_weights(num_devices, num_microbatches):
    """A layer's tasks are back to back on its device: in for the forwards, in for the backwards, out once updated.

    As the paper counts: of the last layer too, which need not leave between its forwards and its backwards.
    """
    runs = harmony_step(num_layers=6, num_devices=num_devices, num_microbatches=num_microbatches)
    swaps = 0
    for device in range(num_devices):
        here = [run for run in runs if run.device == device]
        assert all(one.end_seconds <= other.start_seconds for one, other in itertools.pairwise(here))
        groups = [(run.layer, run.kind == "forward") for run in here]
        swaps += 1 + sum(one != other for one, other in itertools.pairwise(groups))  # in
        swaps += sum(run.kind == "update" for run in here)  # out
    assert swaps == 3 * 6


def test_harmonys_tasks_wait_for_their_inputs():
    runs = {
        (run.kind, run.layer, run.microbatch): run
        for run in harmony_step(num_layers=5, num_devices=2, num_microbatches=3)
    }
    assert len(runs) == 5 * (3 + 3 + 1)
    for (kind, layer, microbatch), run in runs.items():
        needs = {
            "forward": [("forward", layer - 1, microbatch)] if layer else [],
            "backward": [("backward", layer + 1, microbatch) if layer < 4 else ("forward", layer, microbatch)],
            "update": [("backward", layer, other) for other in range(3)],
        }[kind]
        assert all(runs[need].end_seconds <= run.start_seconds for need in needs)
