"""A disk that is full or fails, at every call that writes: a clear error, the last good state whole, the others go on."""

import errno
import json
import logging
import os
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from hydra_tune.checkpoint.best import BestWeights, kept_trials, weights_file
from hydra_tune.checkpoint.folder import generations, load_checkpoint
from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune.errors import ConfigError, FileError, SpillError
from tests.support.failing_writes import FailingWrites
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, short, task

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="says which file a descriptor is of"),
]
ERRNOS = (errno.ENOSPC, errno.EIO)
PARTS = 8
SPILLING = {"device_memory": "12KiB", "num_shards": 4, "host_memory": "10KiB"}


def described(seed):
    return task(seed=seed, epochs=2)


@cache
def plain_numbers(seed):
    """What two trials without any fault end with: told from the first that completes, which was held against the plain loop."""
    with running(devices="cpu:1") as pool:
        result = pool.submit(described(seed)).result(PATIENCE_SECONDS)
    assert against_plain(described(seed), result) == []
    return {name: tensor.clone() for name, tensor in result.state_dict().items()}


def is_right(seed, result):
    expected = plain_numbers(seed)
    return all(torch.equal(tensor, expected[name]) for name, tensor in result.state_dict().items())


def check_named(error, number, folder):
    """A clear error has the path and what the system says."""
    assert isinstance(error, FileError | SpillError), repr(error)
    assert error.errno == number
    assert error.path.startswith(str(folder))
    assert f"[Errno {number}] {os.strerror(number)}" in str(error)
    assert error.path in str(error)


def check_whole(root):
    """Whatever there is of checkpoints is whole, and nothing half written is left."""
    for folder in root.iterdir():
        assert not [path for path in folder.iterdir() if path.suffix == ".tmp"], folder
        if generations(folder):
            load_checkpoint(folder)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """A pool that saves each step and has to send trials to disk; `writes` counts and refuses below the folder of the test."""
    for seed in (1, 2):
        plain_numbers(seed)
    writes = FailingWrites(tmp_path)
    (tmp_path / "spill").mkdir()
    with (
        writes.patched(monkeypatch),
        running(
            devices="cpu:2",
            max_concurrent=2,
            max_retries=0,
            checkpoint_dir=tmp_path / "saved",
            checkpoint_every=1,
            spill_dir=tmp_path / "spill",
            **SPILLING,
        ) as made,
    ):
        assert made.width
        yield made, writes


def run_pair(pool, name):
    """Two trials at once; their results, when all is written."""
    jobs = [pool.submit(described(seed), name=f"{name}-{seed}") for seed in (1, 2)]
    results = [job.result(PATIENCE_SECONDS) for job in jobs]
    pool._pool.checkpoints.flush()
    return results


def refuse_each(pool, writes, tmp_path, caplog, calls_apart, first, *, lasting):
    """Run the pair again and again, refusing call after call."""
    run_pair(pool, "before")
    writes.arm(None, 0)
    run_pair(pool, "counted")
    calls = list(writes.calls)
    assert any("block-" in call for call in calls), "nothing is sent to disk"
    assert any("manifest" in call for call in calls)
    kinds = {call.split(" ")[0] for call in calls}
    assert kinds >= {"open", "write", "pwrite", "fsync", "replace", "mkdir", "ftruncate"}
    failed = saved_less = 0
    for number in ERRNOS:
        for call in range(first, len(calls), calls_apart):
            name = f"t-{number}-{call}"
            caplog.clear()
            writes.arm(call, number, lasting=lasting)
            results = run_pair(pool, name)
            refused = list(writes.refused)
            writes.arm(None, 0)
            for seed, result in zip((1, 2), results, strict=True):
                if result.status == "failed":
                    failed += 1
                    check_named(result.error, number, tmp_path)
                else:
                    assert is_right(seed, result), (name, refused)
            if not lasting:
                assert sum(result.status == "failed" for result in results) <= 1, refused
            told = [text for text in caplog.messages if re.search("could not be (written|removed)", text)]
            saved_less += bool(told)
            for text in told:
                # The last run's checkpoints may be removed as late as now.
                assert re.search(rf"t-\d+-\d+-[12].*\[Errno {number}\]", text), text
            assert not refused or told or any(r.error for r in results) or _is_harmless(refused), refused
            check_whole(tmp_path / "saved")
            for seed in (1, 2):
                go_on(pool, tmp_path / "saved" / f"{name}-{seed}", seed)
    return failed, saved_less


def _is_harmless(refused):
    """Calls that may fail for nothing: a folder that is flushed or made for nothing, and what is only removed."""
    return all(call.split(" ")[0] in ("mkdir", "fsync") or "lock" in call for call in refused)


def go_on(pool, folder, seed):
    """Once there is room, a trial goes on from what it has saved."""
    if folder.is_dir() and generations(folder):
        result = pool.submit(described(seed), name=f"{folder.name}-again", resume_from=folder).result(PATIENCE_SECONDS)
        assert result.error is None
        assert is_right(seed, result), folder


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
def test_a_call_that_writes_is_refused_here_and_there(pool, tmp_path, caplog, lasting):
    failed, saved_less = refuse_each(*pool, tmp_path, caplog, 113, 28, lasting=lasting)
    assert failed or saved_less


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("first", range(PARTS))
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
def test_every_call_that_writes_is_refused_in_turn(pool, tmp_path, caplog, first, lasting):
    failed, saved_less = refuse_each(*pool, tmp_path, caplog, PARTS, first, lasting=lasting)
    assert failed
    assert saved_less


def run_one(place, spill):
    """A trial in a pool of its own: its result, or what the pool has refused to begin with."""
    try:
        with running(checkpoint_dir=place / "saved", spill_dir=spill, event_log=place / "run.jsonl") as pool:
            return pool.run([short()], on_error="return")[0], None
    except ConfigError as error:
        return None, error


@pytest.mark.parametrize("number", ERRNOS)
def test_the_first_calls_of_a_pool_are_refused(tmp_path, monkeypatch, number):
    """Those that make its folders: the pool says so and does not begin; or it begins, and its log ends."""
    spill = tmp_path / "spill"
    spill.mkdir()
    writes = FailingWrites(tmp_path)
    with writes.patched(monkeypatch):
        for call in range(number % 3, 12, 3):
            writes.arm(call, number)
            result, refusal = run_one(tmp_path / str(call), spill)
            if refusal is not None:
                assert f"[Errno {number}]" in str(refusal)
                assert str(tmp_path) in str(refusal)
            elif result.error is not None:
                check_named(result.error, number, tmp_path)
        assert not list(spill.iterdir())


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_event_log_that_cannot_be_written_ends_and_is_readable_and_nothing_else_ends(
    tmp_path, monkeypatch, caplog, number, call
):
    writes, path = FailingWrites(tmp_path), tmp_path / "logs" / "run.jsonl"
    caplog.set_level(logging.WARNING)
    with writes.patched(monkeypatch):
        writes.arm(call, number)
        with running(event_log=path) as pool:
            results = pool.run([short(seed=seed) for seed in range(2)], on_error="return")
    assert [result.status for result in results] == ["completed"] * 2
    if writes.refused:
        (text,) = [record.getMessage() for record in caplog.records if "ends here" in record.getMessage()]
        assert str(path) in text
        assert f"[Errno {number}] {os.strerror(number)}" in text
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            assert line.endswith("\n")
            json.loads(line)


@pytest.mark.parametrize("number", ERRNOS)
def test_weights_that_cannot_be_kept_leave_those_before_as_they_were(tmp_path, monkeypatch, number):
    writes, folder = FailingWrites(tmp_path), tmp_path / "kept"

    def best(trials):
        return set(sorted(trials, key=lambda trial: trials[trial])[:2])

    def offer(kept, trial):
        kept.offer(trial, (-float(trial),), lambda: {"weight": torch.full((70_000,), float(trial))}, {})
        kept.flush()

    def check():
        for trial in kept_trials(folder):
            tensors, _ = load_tensors(weights_file(folder, trial))
            assert torch.equal(tensors["weight"], torch.full((70_000,), float(trial)))

    kept, call, trial = BestWeights(folder, best), 0, 0
    with writes.patched(monkeypatch):
        offer(kept, trial)
        while True:
            trial += 1
            before = set(kept_trials(folder))
            writes.arm(call, number)
            offer(kept, trial)
            refused = list(writes.refused)
            writes.arm(None, 0)
            if not refused:
                break
            check()
            told = kept.failures()
            if trial not in kept_trials(folder):
                ((failed, text),) = told
                assert failed == trial
                assert f"[Errno {number}] {os.strerror(number)}" in text
                assert str(folder) in text
                assert before <= set(kept_trials(folder))
                offer(kept, trial)  # there is room again
                assert trial in kept_trials(folder)
            call += 1
        check()
        kept.close()
    assert call > 5
    assert set(kept_trials(folder)) == {trial, trial - 1}
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
