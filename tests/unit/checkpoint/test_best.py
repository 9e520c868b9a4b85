"""The folder of the best weights: what is in it is whole and among the best, whatever happens meanwhile."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from hydra_tune.checkpoint.best import BestWeights, kept_trials, weights_file
from hydra_tune.checkpoint.tensors import load_metadata, load_tensors


def lowest(count):
    return lambda trials: frozenset(sorted(trials, key=lambda number: (trials[number], number))[:count])


def weights(number):
    return {"w": torch.full((3,), float(number))}


def offer(best, number, value):
    best.offer(number, (value,), lambda: weights(number), {"trial": str(number)})


def test_the_best_stay_and_the_beaten_go(tmp_path: Path):
    best = BestWeights(tmp_path / "w", lowest(2))
    for number, value in enumerate([5.0, 3.0, 4.0, float("inf"), 3.0, 2.0]):
        offer(best, number, value)
        best.flush()
    best.close()
    assert kept_trials(tmp_path / "w") == {1: (3.0,), 5: (2.0,)}
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["trial-1.safetensors", "trial-5.safetensors"]
    for number in (1, 5):
        loaded, metadata = load_tensors(weights_file(tmp_path / "w", number))
        assert loaded["w"].equal(weights(number)["w"])
        assert metadata["trial"] == str(number)
    assert best.failures() == []


def test_weights_of_a_trial_that_is_not_among_the_best_are_not_even_asked_for(tmp_path: Path):
    best = BestWeights(tmp_path / "w", lowest(1))
    offer(best, 0, 1.0)
    best.offer(1, (2.0,), lambda: pytest.fail("asked for"), {})
    best.close()


def test_a_later_process_goes_on_with_what_is_there(tmp_path: Path):
    for number, value in ((0, 1.0), (1, 3.0), (2, 2.0)):
        best = BestWeights(tmp_path / "w", lowest(2))
        offer(best, number, value)
        best.close()
    assert kept_trials(tmp_path / "w").keys() == {0, 2}


def test_what_waits_is_dropped_when_it_is_beaten_and_memory_is_bounded(tmp_path: Path, monkeypatch):
    """The disk hangs in the first write; meanwhile ten better trials end, and nobody has had to wait for it."""
    entered, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def hanging(descriptor):
        entered.set()
        go_on.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", hanging)
    best = BestWeights(tmp_path / "w", lowest(2))
    offer(best, 0, 100.0)
    assert entered.wait(60)
    for number in range(1, 11):
        offer(best, number, 100.0 - number)
    assert best._waiting.keys() == {9, 10}
    go_on.set()
    best.close()
    assert kept_trials(tmp_path / "w").keys() == {9, 10}


def test_what_cannot_be_written_is_told_and_costs_no_other_its_place(tmp_path: Path):
    best = BestWeights(tmp_path / "w", lowest(1))
    offer(best, 0, 2.0)
    best.flush()
    best.offer(1, (1.0,), lambda: {"w": torch.eye(2).to_sparse()}, {})
    best.close()
    ((number, why),) = best.failures()
    assert number == 1
    assert "'w' is of layout torch.sparse_coo" in why
    assert best.failures() == [], "told once"
    assert kept_trials(tmp_path / "w").keys() == {0}


@pytest.mark.cases(1 / 3)
def test_a_full_disk_is_told_and_what_is_kept_stays(tmp_path: Path):
    """A limit on the size of files stands for the disk: the system itself refuses the write."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from hydra_tune.checkpoint.best import BestWeights, kept_trials
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        best = BestWeights(Path(sys.argv[1]), lambda trials: frozenset([max(trials)]))
        for number, size in ((0, 10), (1, 5000), (2, 20)):
            best.offer(number, (0.0,), lambda: {"w": torch.ones(size)}, {})
            best.flush()
            print(sorted(kept_trials(Path(sys.argv[1]))), *(why for _, why in best.failures()))
        best.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "w")], capture_output=True, text=True, check=True
    )
    first, second, third = done.stdout.splitlines()
    assert first == "[0]"
    assert second.startswith("[0] cannot write")
    assert "[Errno 27] File too large; free disk space" in second
    assert third == "[2]"
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["trial-2.safetensors"]


@pytest.mark.cases(1 / 3)
def test_a_process_killed_at_any_moment_leaves_whole_files(tmp_path: Path):
    """While it flushes, before it renames, and after that, before it removes what is beaten."""
    code = """
        import os, signal, sys
        from pathlib import Path
        import torch
        from hydra_tune.checkpoint.best import BestWeights
        for moment in ("fsync", "replace", "unlink"):
            child = os.fork()
            if child == 0:
                best = BestWeights(Path(sys.argv[1]) / moment, lambda trials: frozenset([max(trials)]))
                best.offer(0, (0.0,), lambda: {"w": torch.zeros(3)}, {})
                best.flush()
                setattr(os, moment, lambda *more, **options: os.kill(os.getpid(), signal.SIGKILL))
                best.offer(1, (1.0,), lambda: {"w": torch.ones(3)}, {})
                best.flush()
                os._exit(1)
            print(os.waitpid(child, 0)[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["9"] * 3
    for moment in ("fsync", "replace", "unlink"):
        folder = tmp_path / moment
        there = kept_trials(folder)
        assert there.keys() == ({0, 1} if moment == "unlink" else {0})
        for number in there:
            assert load_tensors(weights_file(folder, number))[0]["w"].equal(torch.full((3,), float(number)))
        best = BestWeights(folder, lambda trials: frozenset([max(trials)]))
        offer(best, 2, 2.0)
        best.close()
        assert [path.name for path in folder.iterdir()] == ["trial-2.safetensors"], "and the next one tidies up"


def test_two_processes_share_a_folder(tmp_path: Path):
    first, second = (BestWeights(tmp_path / "w", lowest(2)) for _ in range(2))
    offers = [(number, (number * 7) % 20) for number in range(20)]
    threads = [
        threading.Thread(target=lambda best=best, part=part: [offer(best, n, float(v)) for n, v in part])
        for best, part in ((first, offers[::2]), (second, offers[1::2]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    second.close()
    assert sorted(kept_trials(tmp_path / "w").values()) == [(0.0,), (1.0,)]


def test_files_of_others_and_damaged_ones_are_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "trial-7.safetensors").write_bytes(b"damaged")
    best = BestWeights(tmp_path, lowest(1))
    offer(best, 0, 1.0)
    best.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "trial-0.safetensors",
        "trial-7.safetensors",
    ]
    assert json.loads(load_metadata(tmp_path / "trial-0.safetensors")["values"]) == [1.0]


def test_weights_are_kept_where_only_the_beaten_file_cannot_be_removed(tmp_path: Path, monkeypatch, caplog):
    def refused(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    best = BestWeights(tmp_path / "w", lowest(1))
    offer(best, 0, 2.0)
    best.flush()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        offer(best, 1, 1.0)
        best.flush()
    assert kept_trials(tmp_path / "w") == {0: (2.0,), 1: (1.0,)}
    assert best.failures() == []
    (message,) = caplog.messages
    assert f"could not be removed: cannot remove '{weights_file(tmp_path / 'w', 0)}'" in message
    offer(best, 2, 0.0)
    best.close()
    assert kept_trials(tmp_path / "w").keys() == {2}
