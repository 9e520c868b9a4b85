"""What `HydraExecutor.plan` says a step moves, against what a run counts."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.devices.copying import BackgroundCopyThread
from hydra_tune.errors import BudgetError, ConfigError, TaskError
from hydra_tune.shard.execute import compute
from hydra_tune.train.timing.fake_trial import TrialRehearsal
from tests.support.forked import forked, run_code
from tests.unit.pool.tasks import SAMPLES, running, task

pytestmark = pytest.mark.usefixtures("captured_once")

WIDTH, LAYERS = 64, 8
LINEAR_BUDGET = "117KiB"  # about what one unit needs, so that next to nothing stays
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
STEPS = 2
Make = Callable[[int], TrainTask]


def linear(steps: int, accumulate: int = 1, **changes: Any) -> TrainTask:
    """Equal layers; steps of 16 samples."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return task(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        train=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1)),
        batch_size=16 // accumulate,
        accumulate=accumulate,
        epochs=steps,
        **changes,
    )


class Noisy(nn.Module):
    """Buffers that forwards overwrite, random numbers, a tied weight, and activations that are worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        blocks = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.blocks = nn.Sequential(*[layer for block in blocks for layer in block])

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(values)))


def noisy(steps: int, **changes: Any) -> TrainTask:
    """Steps of 64 samples."""
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(6))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    return task(model=Noisy, train=data, batch_size=64 // changes.get("accumulate", 1), epochs=steps, **changes)


class Asking(nn.Module):
    """Cannot be cut: its code depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 4)])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
            while float(values.abs().max()) > 1e6:
                values = values / 2
        return values


def counted(pool: HydraExecutor, make: Make) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes in and out of one step by kind; the first steps, which make optimizer state, do not count.

    Nor does the first run, which begins on a device that is not known to be short of memory yet.
    """
    totals: list[tuple[Counter[str], Counter[str]]] = []
    for steps in (2, 2, 2 + STEPS):
        (result,) = pool.run([make(steps)], on_error="return")
        if result.error is not None:
            raise result.error
        (device,) = pool.stats().devices.values()
        totals.append((Counter(device.bytes_in_by_kind), Counter(device.bytes_out_by_kind)))
    ways = zip(*totals, strict=True)
    bytes_in, bytes_out = (
        {kind: last[kind] - 2 * short[kind] + first[kind] for kind in last} for first, short, last in ways
    )
    return _per_step(bytes_in), _per_step(bytes_out)


def _per_step(total: dict[str, int]) -> dict[str, float]:
    return {kind: nbytes / STEPS for kind, nbytes in total.items() if nbytes}


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "one batch": (linear, {}),
    "grouped": (partial(linear, accumulate=4), {}),
    "clipped": (partial(linear, accumulate=4, max_grad_norm=1.0), {}),
    "updates on the host": (partial(linear, accumulate=4), {"optimizer_placement": "host"}),
    "in pieces": (partial(linear, split_batches=2), {}),
    "recomputed": (partial(noisy, activations="recompute"), {"device_memory": "260KiB"}),
    "kept": (partial(noisy, activations="keep"), {"device_memory": "260KiB"}),
    "spilled": (partial(noisy, activations="spill"), {"device_memory": "260KiB"}),
    "accumulated": (partial(noisy, activations="keep", accumulate=2), {"device_memory": "260KiB"}),
}


# "clipped" and "accumulated" are those with more to them, and a test of a model without bytes has "recomputed".
OF_OTHERS = {"one batch", "grouped", "recomputed", "kept"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in OF_OTHERS)) for case in CASES])
def test_without_sending_ahead_it_is_what_is_counted_to_the_byte(case):
    make, changes = CASES[case]
    shards = {"num_shards": LAYERS} if make is linear or getattr(make, "func", None) is linear else {}
    options = {"device_memory": LINEAR_BUDGET, "buffer_fraction": 0.0, **shards, **changes}
    with running(**options) as pool:
        planned = pool.plan([make(5)])
        bytes_in, bytes_out = counted(pool, make)
    assert (planned.bytes_in, planned.bytes_out) == (bytes_in, bytes_out)
    assert sum(bytes_out.values()) > 0


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("activations", [pytest.param("recompute", marks=pytest.mark.slow), "keep"])
def test_with_it_about_that(activations, monkeypatch):
    """What is sent ahead depends on how fast copies are, by some percent: here all are made at once."""
    start = BackgroundCopyThread.start

    def start_and_wait(*arguments):
        copy = start(*arguments)
        copy.wait_quietly()
        return copy

    monkeypatch.setattr(BackgroundCopyThread, "start", start_and_wait)
    make = partial(noisy, activations=activations)
    with running(device_memory="300KiB") as pool:
        planned = pool.plan([make(5)])
        bytes_in, bytes_out = counted(pool, make)
    assert sum(planned.bytes_by_kind.values()) == pytest.approx(
        sum(bytes_in.values()) + sum(bytes_out.values()), rel=0.1
    )


@pytest.mark.cases(1 / 3)
def test_it_says_how_the_trial_would_run():
    with running(num_shards=LAYERS, device_memory=LINEAR_BUDGET) as pool:
        planned = pool.plan([linear(5, accumulate=4, activations="recompute")])
        (result,) = pool.run([linear(3, accumulate=4, activations="recompute")])
        (device,) = pool.stats().devices.values()
    (trial,) = planned.trials
    assert (trial.num_shards, trial.activations) == (result.num_shards, result.activations)
    assert trial.units_per_step == result.units_run / 3
    assert (trial.together, trial.parameter_bytes) == (4, PARAMETER_BYTES)
    assert 2 < planned.parameter_traffic <= 1.02 * 3
    (forecast,) = planned.devices.values()
    assert forecast.budget_bytes == device.budget_bytes
    assert forecast.peak_bytes == pytest.approx(device.peak_bytes, rel=0.05)


def parallel_of(devices: str = "cpu:2", num_shards: int | None = 4, **changes: Any) -> str | None:
    with HydraExecutor(devices, device_memory="1MiB", num_shards=num_shards) as pool:
        (trial,) = pool.plan([linear(3, **{"accumulate": 2} | changes)]).trials
    return trial.parallel


@pytest.mark.cases(1 / 3)
def test_it_says_how_batches_of_a_step_would_use_idle_devices() -> None:
    assert parallel_of(devices="cpu:1") is None
    assert parallel_of(accumulate=1) is None
    for choice, way in (("data", "data-parallel"), ("pipeline", "pipelined")):
        assert (
            parallel_of(parallel=choice)
            == f"batches of a step run {way} on idle devices, as parallel={choice!r} has it"
        )
    keeps = "batches of a step keep to one device, "
    assert parallel_of(parallel="none") == keeps + "as parallel='none' has it"
    assert parallel_of(num_shards=1, parallel="pipeline") == (
        keeps + "because the model is one shard, and a pipeline needs two; give num_shards"
    )
    assert parallel_of(num_shards=None) == (
        keeps + "because the trial runs as it is; parallel='data' would capture the step"
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("link", "told"), [(None, "run data-parallel on idle"), ("20MB/s", "keep to one device, which")]
)
def test_it_predicts_what_idle_devices_gain(link: str | None, told: str) -> None:
    """A batch takes some 50 ms, and its gradients 8 MB: quick to copy, or 400 ms."""
    inputs = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    described = task(
        model=lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)),
        train=torch.utils.data.TensorDataset(inputs, torch.zeros(2048, dtype=torch.long)),
        batch_size=512,
        accumulate=4,
    )
    with HydraExecutor("cpu:2", device_memory="128MiB", num_shards=2, link_bandwidth=link) as pool:
        (trial,) = pool.plan([described]).trials
    assert told in str(trial.parallel)


def test_the_smallest_budget_will_do_and_much_less_will_not():
    with running(num_shards=LAYERS, device_memory=LINEAR_BUDGET) as pool:
        (trial,) = pool.plan([linear(5)]).trials
    enough = trial.smallest_budget_bytes
    with running(num_shards=LAYERS, device_memory=enough) as pool:
        (result,) = pool.run([linear(2)])
    assert result.status == "completed"
    with running(num_shards=LAYERS, device_memory=enough * 99 // 100) as pool, pytest.raises(BudgetError) as refusal:
        pool.plan([linear(5)])
    assert refusal.value.enough_bytes == pytest.approx(enough, rel=0.002)


def test_a_model_that_runs_whole_is_planned_as_well():
    with running(device_memory="64KiB") as pool:
        (trial,) = pool.plan([task(model=Asking)]).trials
        (result,) = pool.run([task(model=Asking)])
    assert (trial.is_whole, trial.num_shards) == (True, 1)
    assert trial.step_seconds > 0
    assert trial.units_per_step == 2
    assert result.status == "completed"


def test_a_batch_size_may_be_there_for_the_validation_data_alone():
    one = task(train=lambda: [SAMPLES[:8]], validate=SAMPLES, batch_size=8)
    with running(num_shards=2) as pool:
        (trial,) = pool.plan([one]).trials
    assert trial.num_shards == 2


class Masking(Asking):
    """How large its tensors are depends on values, too."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + values[values > 0].sum()


def test_one_whose_code_wants_values_is_refused():
    with (
        running(device_memory="64KiB") as pool,
        pytest.raises(ConfigError, match="trial0 cannot be planned: its code reads values of its tensors"),
    ):
        pool.plan([task(model=Masking)])


class Halving(Asking):
    """How long it goes on depends on values."""

    def forward(self, values: Tensor) -> Tensor:
        while values.norm() >= 1:
            values = values * 0.5
        return super().forward(values)


def test_one_that_goes_on_until_values_are_right_is_refused_and_trains(monkeypatch):
    monkeypatch.setattr("hydra_tune.shard.fake.fake_world._MOST_READS", 300)
    with running() as pool:
        with pytest.raises(ConfigError, match="it has read 300 values in one unit, each of which is taken to be 1"):
            pool.plan([task(model=Halving)])
        (result,) = pool.run([task(model=Halving)])
    assert result.status == "completed"


class SparseGradient(nn.Module):
    """Which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4, sparse=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.rows((values[:, 0] > values.mean().item()).long())


class SparseBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("map", torch.eye(4).to_sparse())

    def forward(self, values: Tensor) -> Tensor:
        return (self.map @ super().forward(values).T).T


@pytest.mark.parametrize(
    ("model", "told"), [(SparseGradient, "of 'rows.weight' is"), (SparseBuffer, "'map' of the model is")]
)
def test_sparse_gradients_and_state_are_refused_by_name(model, told):
    made = task(model=model, optimizer=partial(torch.optim.SGD, lr=0.1))
    with running() as pool:
        with pytest.raises(TaskError, match=f"{told} sparse"):
            pool.plan([made])
        (result,) = pool.run([made], on_error="return")
    assert isinstance(result.error, TaskError)


class Unique(nn.Linear):
    """Torch has no backward of what its forward calls."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        found = super().forward(values)
        return found + torch.unique(found).sum()


def test_trials_that_cannot_be_planned_are_told_and_fail_by_themselves_and_the_others_are_planned():
    tasks = [task(model=Unique), task(), task(model=Masking)]
    with running() as pool:
        planned, alone = pool.plan(tasks), pool.plan([task()])
        with pytest.raises(TaskError, match="trial0 cannot be planned: it fails with NotImplementedError") as raised:
            pool.plan(tasks[:1])
        results = pool.run(tasks, on_error="return")
    assert [trial.name for trial in planned.trials] == ["trial1"]
    assert list(planned.failed) == ["trial0", "trial2"]
    assert list(planned.to_json()["failed"].values()) == [str(error) for error in planned.failed.values()]
    assert planned.devices == alone.devices
    for error in (raised.value, planned.failed["trial0"]):
        assert isinstance(error.__cause__, NotImplementedError)
        assert "_unique2" in str(error)
    assert "trial2 cannot be planned: its code reads values of its tensors" in str(planned.failed["trial2"])
    assert [result.status for result in results] == ["failed", "completed", "completed"]
    assert "_unique2" in str(results[0].error)


@pytest.mark.cases(1 / 3)
def test_a_compiled_model_is_planned_as_it_was_before():
    with running(device_memory=LINEAR_BUDGET, num_shards=LAYERS) as pool:
        compiled = pool.plan([linear(5, compile="eager")])
        plain = pool.plan([linear(5, activations="recompute")])
    assert compiled.bytes_by_kind == plain.bytes_by_kind


@pytest.mark.cases(1 / 3)
def test_what_crosses_cuts_is_apart_from_what_is_kept():
    options = {"device_memory": "160KiB", "buffer_fraction": 0.0}
    with running(**options) as pool:
        recomputed = pool.plan([noisy(5, activations="recompute")]).bytes_by_kind
        kept = pool.plan([noisy(5, activations="keep")]).bytes_by_kind
    assert recomputed["boundaries"] > 0
    assert recomputed.get("activations", 0) < recomputed["boundaries"] < kept["activations"]


@pytest.mark.cases(1 / 3)
def test_a_model_without_bytes_is_planned_like_one_that_is_built(monkeypatch):
    """But for what only a run can tell."""
    options = {"device_memory": "260KiB", "buffer_fraction": 0.0}
    make = partial(noisy, activations="recompute", max_grad_norm=1.0)
    with running(**options) as pool:
        built = pool.plan([make(5)])
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_BUILT_BYTES", 1 << 10)
    monkeypatch.setattr("hydra_tune.shard.capture.meta_models._SMALL_BYTES", 1 << 9)
    with running(**options) as pool:
        unbuilt = pool.plan([make(5)])
        bytes_in, bytes_out = counted(pool, make)
    assert (built.trials[0].is_checked, unbuilt.trials[0].is_checked) == (True, False)
    assert unbuilt.trials[0].step_seconds == 0.0
    assert (unbuilt.bytes_in, unbuilt.bytes_out) == (built.bytes_in, built.bytes_out) == (bytes_in, bytes_out)
    known = ("num_shards", "units_per_step", "unit_bytes", "smallest_budget_bytes", "parameter_bytes")
    assert [getattr(unbuilt.trials[0], name) for name in known] == [getattr(built.trials[0], name) for name in known]


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    "case",
    ["recomputed"]
    + [
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("kept", "spilled", "accumulated", "clipped", "updates on the host")
    ],
)
def test_what_is_remembered_is_what_is_run(monkeypatch, case):
    """Units that are run once, and operators that are not run at all, change no byte and no peak; nor do two devices."""
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_BUILT_BYTES", 1 << 10)
    monkeypatch.setattr("hydra_tune.shard.capture.meta_models._SMALL_BYTES", 1 << 9)
    make, changes = CASES[case]
    options = {"device_memory": LINEAR_BUDGET, "buffer_fraction": 0.0, "num_shards": 3, **changes, "devices": "cpu:2"}
    task = make(5, optimizer=partial(torch.optim.AdamW, lr=0.1))
    with running(**options) as pool:
        quick = pool.plan([task, task])
    monkeypatch.setattr("hydra_tune.train.timing.fake_trial.MemoizedShardExecutor", lambda: compute)
    for module in ("hydra_tune.shard.fake.fake_world", "hydra_tune.shard.cost.update_pilot"):
        monkeypatch.setattr(f"{module}.overwritten", lambda func, args: None)
    with running(**options) as pool:
        assert pool.plan([task, task]) == quick
    assert quick.bytes_by_kind["optimizer" if case != "updates on the host" else "parameters"] > 0


@pytest.mark.cases(1 / 3)
def test_steps_that_repeat_are_not_run_again(monkeypatch):
    runs = Counter()

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(compute, name)

        def run(shard, *args, **keywords):
            runs[name, shard.first] += 1
            return function(shard, *args, **keywords)

        return run

    with running(device_memory="260KiB", buffer_fraction=0.0) as pool:
        pool.plan([noisy(5, activations="recompute")])  # measured
        for name in ("forward", "backward"):
            monkeypatch.setattr(compute, name, counting(name))
        monkeypatch.setattr("hydra_tune.pool.dry_run.report.timed_steps", lambda *args, **keywords: None)
        (trial,) = pool.plan([noisy(5, activations="recompute")]).trials
    assert trial.units_per_step > 3
    assert sum(runs.values()) > 2
    assert set(runs.values()) == {1}


@pytest.mark.cases(1 / 3)
def test_what_was_not_checked_is_not_trained_with(monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_CHECKED_BYTES", 1 << 10)
    with running(device_memory="260KiB") as pool:
        (trial,) = pool.plan([noisy(2)]).trials
        library = pool._started()._library
        assert not trial.is_checked
        assert not library.checked.plans
        pool.run([noisy(2)])
        assert library.checked.plans
        assert pool.plan([noisy(2)]).trials[0].is_checked


@pytest.mark.cases(1 / 3)
def test_what_was_not_built_is_captured_and_rehearsed_once_for_all_that_differ_in_rates(monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_CHECKED_BYTES", 1 << 10)
    rehearsed = []

    class Counted(TrialRehearsal):
        def steps(self, count):
            rehearsed.append(count)
            return super().steps(count)

    monkeypatch.setattr("hydra_tune.pool.dry_run.report.TrialRehearsal", Counted)
    with running(device_memory="260KiB") as pool:
        made = [noisy(2, optimizer=partial(torch.optim.AdamW, lr=lr)) for lr in (0.1, 0.2)]
        one, other = (pool.plan([task]) for task in made)
        assert len(rehearsed) == 1
        assert other == one
        sgd = pool.plan([noisy(2, optimizer=partial(torch.optim.SGD, lr=0.1))])
        summed = pool.plan([noisy(2, optimizer=partial(torch.optim.AdamW, lr=0.1), accumulate=2)])
        assert len(rehearsed) == 3
    assert one.bytes_by_kind not in (sgd.bytes_by_kind, summed.bytes_by_kind)


def test_a_plan_is_made_once_for_planning_and_training():
    with running(device_memory="300KiB") as pool:
        planned = pool.plan([noisy(2, activations="auto")])
        (result,) = pool.run([noisy(2, activations="auto")])
    assert result.activations == planned.trials[0].activations


class RandomClock:
    """Makes no sense, as clocks of a busy machine do."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def perf_counter(self) -> float:
        return self._source.random()


@pytest.mark.cases(1 / 3)
def test_what_is_kept_is_chosen_by_no_clock(monkeypatch):
    """So a plan that is made today is that of the run tomorrow."""
    plans = []
    for seed in range(2):
        monkeypatch.setattr("hydra_tune.shard.verify.step_outcome.time", RandomClock(seed))
        with running(device_memory="160KiB", buffer_fraction=0.0) as pool:
            planned = pool.plan([noisy(2, activations="auto")])
        plans.append((planned.trials[0].activations, planned.bytes_by_kind))
    assert len(plans[0][0]) > 2
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("buffer_fraction", [pytest.param(0.0, marks=pytest.mark.slow), 0.15])
def test_a_step_takes_as_long_as_its_copies_at_least(buffer_fraction):
    bandwidth = 10_000_000
    options = {"device_memory": "300KiB", "link_bandwidth": bandwidth, "buffer_fraction": buffer_fraction}
    with running(**options) as pool:
        planned = pool.plan([noisy(5, activations="recompute")])
    moved = sum(planned.bytes_by_kind.values())
    assert moved > 0
    assert planned.trials[0].step_seconds > moved / bandwidth


@pytest.mark.slow
def test_steps_of_two_trials_on_one_device_take_twice_as_long():
    options = {
        "devices": "cpu:1",
        "device_memory": "300KiB",
        "link_bandwidth": 1_000_000,
    }  # copies are next to all there is
    with running(**options) as pool:
        alone = pool.plan([noisy(5, activations="recompute")])
        both = pool.plan([noisy(5, activations="recompute")] * 2)
    assert both.trials[0].step_seconds > 1.5 * alone.trials[0].step_seconds


def test_a_large_model_that_cannot_be_cut_is_refused(monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_BUILT_BYTES", 1 << 10)
    monkeypatch.setattr("hydra_tune.shard.capture.meta_models._SMALL_BYTES", 1 << 9)
    with running(device_memory="64KiB") as pool, pytest.raises(ConfigError, match="too large here; make it capturable"):
        pool.plan([task(model=Asking)])


def test_a_large_model_whose_factory_reads_its_weights_is_refused(monkeypatch):
    def scaled() -> nn.Module:
        model = nn.Linear(8, 64)
        model.scale = float(model.weight.detach().norm())
        return model

    monkeypatch.setattr("hydra_tune.pool.dry_run.report._MOST_BUILT_BYTES", 1 << 10)
    monkeypatch.setattr("hydra_tune.shard.capture.meta_models._SMALL_BYTES", 1 << 9)
    with running() as pool, pytest.raises(ConfigError, match="trial0 cannot be planned: its model is too large"):
        pool.plan([task(model=scaled)])


LARGE = """
import resource
from functools import partial

import torch
from torch import nn

from hydra_tune import HydraExecutor, TrainTask

WIDTH, LAYERS = 4096, 6  # 384 MiB; with gradients and optimizer state four times that

def data():
    yield torch.randn(2, WIDTH), torch.randn(2, WIDTH)

def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

small = TrainTask(model=lambda: nn.Linear(WIDTH, 8), optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss,
                  train=lambda: iter([(torch.randn(2, WIDTH), torch.randn(2, 8))]))
task = TrainTask(model=model, optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss, train=data)
with HydraExecutor("cpu:1", device_memory="700MiB") as pool:
    pool.plan([small])  # what torch loads when it captures
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (trial,) = pool.plan([task]).trials
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(trial.num_shards, trial.parameter_bytes, (after - before) // 1024)
"""


def test_a_large_model_takes_no_memory():
    """MiB of the process's peak: less than the model alone, of which torch's own tables and one batch are a small part."""
    run = forked(run_code, LARGE)
    assert run.returncode == 0, run.stderr
    num_shards, parameter_bytes, grown = map(int, run.stdout.split())
    assert num_shards > 1
    assert parameter_bytes == 4 * 6 * (4096 * 4096 + 4096)
    assert grown < 300


@pytest.mark.cases(1 / 3)
def test_architectures_are_numbered():
    with running() as pool:
        other = partial(task, model=lambda: nn.Linear(8, 4))
        first, second, third = pool.plan([task(), task(optimizer=torch.optim.SGD), other()]).trials
        (again,) = pool.plan([other(epochs=5)]).trials
    assert [first.architecture, second.architecture, third.architecture, again.architecture] == [0, 0, 1, 1]


@pytest.mark.cases(1 / 3)
def test_nothing_is_trained_and_nothing_is_left():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with running(num_shards=2) as pool:
        pool.plan([task(), task()])
        stats = pool.stats()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
    assert stats.units_run == 0
    assert sum(device.bytes_in + device.bytes_out for device in stats.devices.values()) == 0


@pytest.mark.cases(1 / 3)
def test_two_trials_on_two_devices():
    """Each stays where it is, but for what goes through the host anyway."""
    with running(devices="cpu:2", device_memory=LINEAR_BUDGET, num_shards=LAYERS, buffer_fraction=0.0) as pool:
        both = pool.plan([linear(5), linear(5)])
        alone = pool.plan([linear(5)])
    assert len(both.trials) == 2
    assert sum(both.bytes_by_kind.values()) == pytest.approx(sum(alone.bytes_by_kind.values()), rel=0.02)
    shares = [sum(device.bytes_in.values()) for device in both.devices.values()]
    assert min(shares) == pytest.approx(max(shares), rel=0.1)


def test_no_task_is_refused():
    with HydraExecutor("cpu:1") as pool, pytest.raises(ConfigError, match="no task to plan"):
        pool.plan([])


def test_an_error_of_the_task_is_told_with_its_cause():
    def broken() -> nn.Module:
        raise RuntimeError("no such model")

    told = "trial0 cannot be planned: it fails with RuntimeError: no such model"
    with HydraExecutor("cpu:1") as pool, pytest.raises(TaskError, match=told) as raised:
        pool.plan([task(model=broken)])
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.cases(1 / 3)
def test_what_the_users_code_counts_is_left_as_it_was():
    counts = Counter[str]()

    def train() -> Any:
        counts["passes"] += 1
        return [SAMPLES[:8]]

    def after_step(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        counts["steps"] += 1

    counting = task(train=train, after_step=after_step)
    with running(num_shards=2, fusion="auto") as pool:
        assert pool.plan([counting, counting], probe=True).trials
    assert not counts.total()


class Scaled(nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), {"of outputs": torch.full((), 2.0)}

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) * self.scale["of outputs"]


def test_a_model_with_a_tensor_of_its_own_and_a_task_with_finish_are_planned() -> None:
    inputs = torch.randn(16, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    scaled = task(
        model=Scaled,
        train=data,
        validate=data,
        batch_size=16,
        evaluate=lambda module, batch: {"output": module(batch[0])},
        finish=lambda collected: {"loss": collected["output"].mean()},
    )
    with HydraExecutor("cpu:1", num_shards=1) as pool:
        assert [trial.num_shards for trial in pool.plan([scaled]).trials] == [1]
