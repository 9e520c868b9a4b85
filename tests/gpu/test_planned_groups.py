"""Planned groups and pairs in a pool on GPUs.

Each trains the same trials with room for all of them first, as one group or as two, and holds what comes of it in less memory
against that, bit for bit.
"""

import functools
import gc
import logging
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.fusion.runtime import plan_autotuner, planned_group_size, planned_size_search
from hydra_tune.fusion.runtime.plan_report import PlannedSizeOption
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.planner.run.interpreter import MergedGraphInterpreter
from hydra_tune.planner.run.runner import MergedGraphRunner
from hydra_tune.pool.job import OVER, Reported
from tests.gpu.bits import assert_same_bits, bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # In full float32 cuDNN may take other algorithms for planned steps, of other last digits (docs/results/gpu.md).
    pytest.mark.usefixtures("deterministic_kernels"),
]
PATIENCE_SECONDS = 300.0
ROOMY = 4 << 30
SHARES = {4: 0.75, 2: 0.45}  # of what a step of all four takes as it is, by members of a group
LIBRARIES = 64 << 20  # workspaces of cuBLAS, for each stream that multiplies
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(160, 3, 32, 32, generator=GENERATOR), torch.randint(4, (160,), generator=GENERATOR)


class CNN(nn.Module):
    """Activations of some MiB beside few parameters, with running statistics and dropout."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(functional.dropout(x.mean((2, 3)), 0.2, self.training))


def task(seed, **changes):
    """Epochs of two batches of 64 samples and one of 32."""
    arguments = {
        "model": CNN,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3 * (seed + 1)),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:64], Y[:64]),
        "batch_size": 64,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


@functools.cache
def roomy(size, count=4, epochs=2):
    """Groups of so many members with everything kept: what members come to, and the most memory that was taken."""
    with HydraExecutor("cuda:0", ROOMY, fusion="on", fusion_size=size, fusion_planner="off", max_concurrent=2) as pool:
        results = pool.run([task(seed, epochs=epochs) for seed in range(count)])
        peak = pool.stats().devices["cuda:0"].peak_bytes
    assert {result.group_size for result in results} == {size}
    return [bits(result) for result in results], peak


def memory(size):
    """Too little for four as they are."""
    return int(SHARES[size] * roomy(4)[1])


@pytest.fixture(params=[4, 2], ids=["one group", "two in turn"])
def size(request, monkeypatch):
    """Members of a group; where that is half of all, two groups take turns. Nothing else is planned."""
    wanted, tried = 4 // request.param, planned_group_size._tried

    def only(planner, stacks):
        if len(stacks) == wanted:
            return tried(planner, stacks)
        return PlannedSizeOption(name="", sizes=tuple(one.updates.count for one in stacks), why_not="not in this test")

    monkeypatch.setattr(planned_group_size, "_tried", only)
    return request.param


@pytest.fixture
def segments(monkeypatch):
    """Merged graphs that were run: of how many groups, and on which GPU."""
    found = []
    segment = MergedGraphRunner.segment

    def noted(self, which, take=None):
        found.append((len(self._ended), torch.cuda.current_device()))
        segment(self, which, take)

    monkeypatch.setattr(MergedGraphRunner, "segment", noted)
    return found


def pool_of(size, devices="cuda:0", **options):
    arguments = {"fusion": "on", "fusion_size": 4, "fusion_planner": "on"} | options
    return HydraExecutor(devices, memory(size), **arguments)


def emptied():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    return torch.cuda.memory_allocated(0)


def test_the_bits_are_those_of_groups_that_fit_and_memory_is_what_there_is(size, segments, caplog):
    expected, budget, before = roomy(size)[0], memory(size), emptied()
    with pool_of(size) as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run([task(seed) for seed in range(4)])
        device = pool.stats().devices["cuda:0"]
        peak = (
            torch.cuda.max_memory_allocated(0) - before
        )  # profiles look at it anew, so it is that of a part of the run
    assert_same_bits([bits(result) for result in results], expected)
    assert {result.group_size for result in results} == {size}
    assert {groups for groups, _ in segments} >= {4 // size}
    assert 0.5 * budget < device.peak_bytes <= budget
    assert peak <= budget + LIBRARIES
    assert ("predicted: one group (4" if size == 4 else "predicted: two in turn (2 + 2") in caplog.text


@pytest.mark.parametrize(
    "devices",
    [
        "cuda:0,0",
        pytest.param("cuda:0,1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    ],
)
def test_on_two_devices_groups_run_wherever_there_is_room(size, devices, segments):
    expected = roomy(size, count=8)[0]
    with pool_of(size, devices, max_concurrent=4) as pool:
        results = pool.run([task(seed) for seed in range(8)])
        peaks = [device.peak_bytes for device in pool.stats().devices.values()]
    assert_same_bits([bits(result) for result in results], expected)
    assert max(peaks) <= memory(size)
    if devices == "cuda:0,1":
        assert {gpu for _, gpu in segments} == {0, 1}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_group_goes_on_on_another_gpu(size, segments):
    """Its first device leaves the pool after the first report."""
    expected = roomy(size, epochs=6)[0]
    with pool_of(size, "cuda:0") as pool:
        events = pool.events()
        jobs = [pool.submit(task(seed, epochs=6), None, events) for seed in range(4)]
        waiting = [events.get(PATIENCE_SECONDS) for _ in jobs]
        assert all(isinstance(event, Reported) for event in waiting)
        pool.add_device("cuda:1")
        pool.remove_device("cuda:0")
        for event in waiting:
            event.job.proceed()
        while not all(job.state in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed()
        results = [job.result() for job in jobs]
    assert_same_bits([bits(result) for result in results], expected)
    assert {gpu for _, gpu in segments} == {0, 1}


def test_a_pruned_member_changes_nobody_elses_bits(size, segments):
    expected = roomy(size, epochs=6)[0]
    with pool_of(size) as pool:
        events = pool.events()
        jobs = [pool.submit(task(seed, epochs=6), None, events) for seed in range(4)]
        while not all(job.state in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported) and event.job is jobs[1] and event.step == 1:
                event.job.prune()
            elif isinstance(event, Reported):
                event.job.proceed()
        results = [job.result() for job in jobs]
        assert pool.stats().devices["cuda:0"].peak_bytes <= memory(size)
    assert [result.status for result in results] == ["completed", "pruned", "completed", "completed"]
    assert_same_bits([bits(results[n]) for n in (0, 2, 3)], [expected[n] for n in (0, 2, 3)])
    assert segments


def test_they_go_on_from_checkpoints(size, segments, tmp_path):
    tasks, names = [task(seed) for seed in range(4)], [f"trial {seed}" for seed in range(4)]
    with pool_of(size, checkpoint_dir=tmp_path) as pool:
        events = pool.events()
        jobs = [pool.submit(one, name, events) for one, name in zip(tasks, names, strict=True)]
        waiting = [events.get(PATIENCE_SECONDS) for _ in jobs]
        assert all(isinstance(event, Reported) for event in waiting)
        pool.suspend(jobs)
    with pool_of(size, checkpoint_dir=tmp_path) as pool:
        paths = [pool.find_checkpoint(name).path for name in names]
        again = [pool.submit(one, name, resume_from=path) for one, name, path in zip(tasks, names, paths, strict=True)]
        results = [job.result(PATIENCE_SECONDS) for job in again]
    assert_same_bits([bits(result) for result in results], roomy(size)[0])
    assert segments


def test_a_forward_that_runs_out_of_memory_is_repeated_with_the_same_bits(size, monkeypatch):
    """The allocator is asked for more than there is behind everything that the forward has made and drawn."""
    segment, failed = MergedGraphRunner.segment, []

    def fails(self, which, take=None):
        segment(self, which, take)
        if which.backward is None and not failed:
            failed.append(which)
            self._left = {}
            self._begun[which.forward] -= 1
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0")

    monkeypatch.setattr(MergedGraphRunner, "segment", fails)
    with pool_of(size) as pool:
        results = pool.run([task(seed) for seed in range(4)], on_error="return")
        assert pool.stats().devices["cuda:0"].units_repeated == 1
    assert failed
    assert_same_bits([bits(result) for result in results], roomy(size)[0])


def test_a_member_whose_loss_is_not_finite_fails_alone(size, segments):
    tasks = [task(seed) for seed in range(4)]
    tasks[3] = replace(tasks[3], optimizer=partial(torch.optim.AdamW, lr=1e30))
    with pool_of(size) as pool:
        results = pool.run(tasks, on_error="return")
    assert [result.status for result in results] == ["completed"] * 3 + ["failed"]
    assert_same_bits([bits(result) for result in results[:3]], roomy(size)[0][:3])
    assert segments


def test_steps_are_timed_by_the_gpu_and_the_log_says_what_they_took(size, caplog):
    with pool_of(size) as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run([task(seed, epochs=30) for seed in range(4)])
    assert [result.error for result in results] == [None] * 4
    assert "measured: a planned step of" in caplog.text


def test_steps_that_prove_slower_are_given_up_with_auto(size, segments, monkeypatch, caplog):
    """Each graph has the GPU sleep first; from the ninth of twelve epochs on nobody is answered before that is seen."""
    monkeypatch.setattr(planned_size_search, "COST_SHARE", float("inf"))
    monkeypatch.setattr(StepPlanner, "kept_seconds", lambda _self, _stack: 1000.0)
    monkeypatch.setattr(plan_autotuner, "_WARM_UPS", 0)
    monkeypatch.setattr(plan_autotuner, "_TURNS", 1)
    run, line = MergedGraphInterpreter.run, "prove slower and are given up"

    def slowly(self, given):
        torch.cuda._sleep(50_000_000)
        return run(self, given)

    monkeypatch.setattr(MergedGraphInterpreter, "run", slowly)
    expected, held, seen = roomy(size, epochs=12)[0], [], None
    with pool_of(size, fusion_planner="auto") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        events, until = pool.events(), time.monotonic() + PATIENCE_SECONDS
        jobs = [pool.submit(task(seed, epochs=12), None, events) for seed in range(4)]
        while not all(job.state in OVER for job in jobs):
            assert time.monotonic() < until, caplog.text
            event = events.get(0.1)
            held += [event] if isinstance(event, Reported) else []
            if seen is None and line in caplog.text:
                seen = len(segments)
            for one in [one for one in held if one.step < 8 or line in caplog.text]:
                held.remove(one)
                one.job.proceed()
        results = [job.result() for job in jobs]
        peak = pool.stats().devices["cuda:0"].peak_bytes
    assert caplog.text.count(line) == 1
    assert seen
    assert len(segments) - seen <= 8  # of the epoch that is under way then
    assert peak <= memory(size)
    for result, other in zip(results, expected, strict=True):  # smaller groups may have other last digits
        history = bits(result)[0]
        assert [one["step"] for one in history] == list(range(12))
        for name in ("train_loss", "val_loss"):
            assert [one[name] for one in history] == pytest.approx([one[name] for one in other[0]], rel=0.03)  # TF32
