"""Programs written from the documentation: their Python state changes, and the numbers stay those of a plain loop."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_tune import EventStream, HydraExecutor, HydraTuneError, Reported, Result, TrainTask
from hydra_tune.fusion.matching import group_size_chooser, group_size_policy
from tests.parity.from_the_docs import plain_loop
from tests.parity.from_the_docs_more import PROGRAMS

pytestmark = pytest.mark.slow

RATES = (0.1, 0.05, 0.2)
SHARDS = 3
LIMIT = 120.0

# A cut would need what a graph cannot follow, and the error says which state that is.
REFUSED = {
    "context_variable": "the variable 'weight' of step= is a ContextVar",
    "thread_local": "the variable 'local' of the variable 'weight' of step= is a _local",
    "pruned_later": "'2.weight'",
}
# The step changes its own state, or reads what cannot be compared.
WHOLE = {
    "cached_schedule",
    "gradient_penalty",
    "loss_scaled_by_its_own_average",
    "memory_bank",
    "noise_of_a_generator",
    "scale_by_a_forward_pre_hook",
    "trainer_by_a_weak_reference",
}
FUSED = {
    "curriculum_object",
    "mixup_by_an_enum",
    "patience_that_lowers_a_weight",
    "temperature_counted_by_the_collation",
    "temperature_in_a_buffer",
    "criterion_module",
    "criterion_whose_buffer_is_written",
    "focal_gamma_in_a_config",
    "layered_config",
    "ramp_by_a_partial",
    "registry_of_losses",
    "sampler_that_counts_its_epochs",
    "sampler_with_set_epoch",
    "schedule_of_numpy",
    "set_epoch_by_the_scheduler",
    "smoothing_by_a_dataclass",
    "stream_with_set_epoch",
    "weights_from_a_confusion_matrix",
    "weights_in_a_deque",
    "weights_of_batches",
}
# State that a checkpoint holds, or that the scheduler or `stop` sets anew from the epoch or the reports.
RESUMED = [
    "alpha_of_an_own_scheduler",
    "cached_schedule",
    "criterion_module",
    "depth_written_after_each_step",
    "dropout_by_the_scheduler",
    "dropout_written_after_each_step",
    "gradient_penalty",
    "layered_config",
    "mixup_by_an_enum",
    "penalty_by_the_learning_rate",
    "ramp_by_a_partial",
    "registry_of_losses",
    "sampler_that_counts_its_epochs",
    "scale_by_a_forward_pre_hook",
    "set_epoch_by_the_scheduler",
    "smoothing_by_a_dataclass",
    "stochastic_depth",
    "temperature_in_a_buffer",
    "weights_of_batches",
    "weights_of_losses_in_the_model",
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_cut_has_the_bits_of_a_plain_loop(name: str) -> None:
    make = PROGRAMS[name]
    with HydraExecutor("cpu:1", num_shards=SHARDS) as pool:
        (result,) = pool.run([TrainTask(**make(RATES[0]))], on_error="return")

    if name in REFUSED:
        assert REFUSED[name] in str(result.error)
        return
    assert_same_bits(result, make)
    assert result.num_shards == (1 if name in WHOLE else SHARDS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_fused_have_the_numbers_of_plain_loops(name: str) -> None:
    make = PROGRAMS[name]
    with HydraExecutor("cpu:1", fusion="on", fusion_size=4) as pool:
        results = pool.run([TrainTask(**make(lr)) for lr in RATES])

    for result, lr in zip(results, RATES, strict=True):
        history, weights = plain_loop(**make(lr))
        assert [shown(report, history[0]) for report in result.history] == [
            pytest.approx(report, rel=1e-9) for report in history
        ]
        torch.testing.assert_close(result.state_dict(), weights, rtol=1e-9, atol=1e-12)
        assert result.group_size == (len(RATES) if name in FUSED else 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_whose_steps_were_timed_have_the_numbers_of_plain_loops(name: str, monkeypatch: Any) -> None:
    """`fusion="auto"` draws batches and runs steps to time them, and no group gains enough."""
    monkeypatch.setattr(group_size_policy, "LEAST_GAIN", 1e6)
    monkeypatch.setattr(group_size_policy, "COST_SHARE", 1e6)
    monkeypatch.setattr(group_size_chooser, "_LEAST_STEPS", 0)
    make = PROGRAMS[name]
    with HydraExecutor("cpu:1", fusion="auto", fusion_size=4) as pool:
        results = pool.run([TrainTask(**make(lr)) for lr in RATES])

    for result, lr in zip(results, RATES, strict=True):
        history, weights = plain_loop(**make(lr))
        assert [shown(report, history[0]) for report in result.history] == [
            pytest.approx(report, rel=1e-9) for report in history
        ]
        torch.testing.assert_close(result.state_dict(), weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", sorted(set(PROGRAMS) - {"weights_of_an_iterator"})
)  # what a plan has drawn there is gone
def test_a_program_that_was_planned_before_has_the_numbers_of_a_plain_loop(name: str) -> None:
    make = PROGRAMS[name]
    task = TrainTask(**make(RATES[0]))
    with HydraExecutor("cpu:1", num_shards=SHARDS) as pool:
        with contextlib.suppress(HydraTuneError):
            pool.plan([task])
        (result,) = pool.run([task], on_error="return")

    if name in REFUSED:
        assert REFUSED[name] in str(result.error)
    else:
        assert_same_bits(result, make)


@pytest.mark.parametrize("name", RESUMED)
def test_a_program_goes_on_from_a_checkpoint_with_the_same_bits(name: str, tmp_path: Path) -> None:
    make, reports = PROGRAMS[name], EventStream()
    with HydraExecutor("cpu:1", num_shards=SHARDS, checkpoint_dir=tmp_path) as pool:
        job = pool.submit(TrainTask(**make(RATES[0])), name, reports)
        assert isinstance(reports.get(LIMIT), Reported)
        job.proceed()
        assert isinstance(reports.get(LIMIT), Reported)
        pool.suspend()

    with HydraExecutor("cpu:1", num_shards=SHARDS, checkpoint_dir=tmp_path) as pool:
        found = pool.find_checkpoint(name)
        result = pool.submit(TrainTask(**make(RATES[0])), name, resume_from=found.path).result(LIMIT)

    assert_same_bits(result, make)


def assert_same_bits(result: Result, make: Callable[[float], dict[str, Any]]) -> None:
    assert result.status == "completed", result.error
    history, weights = plain_loop(**make(RATES[0]))
    assert [shown(report, history[0]) for report in result.history] == history
    torch.testing.assert_close(result.state_dict(), weights, rtol=0, atol=0)


def shown(report: dict[str, float], names: dict[str, float]) -> dict[str, float]:
    """The values of a report that the plain loop has too."""
    return {name: report[name] for name in names}
