"""A database that another process has locked, and a clock that is set forward: searches go on, and nothing is lost.

The lock is a real one of a second process. The clock is set for one process: a library that is loaded before the C library adds
to the time of day that it tells, to Python and to SQLite alike; nothing else of the machine notices.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import optuna as stock
import pytest
from optuna.trial import TrialState

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from tests.support.killed_search import ENQUEUED, NUM_TRIALS, STUDY, ByNumber, begin, build, storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

LOCKING = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for _ in range(2):
    connection.execute("BEGIN EXCLUSIVE")
    print("locked", flush=True)
    time.sleep(10)
    connection.execute("COMMIT")
    print("open", flush=True)
    time.sleep(2)
"""


class Locker:
    """Locks the database for ten seconds, twice, from the first trial that is told on; beside it, others are asked and told."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._process: subprocess.Popen[str] | None = None
        self.locked = 0

    def __call__(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if self._process is None:
            command = [sys.executable, "-c", LOCKING, str(self._database)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._listen()
            threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while self._listen():
            pass

    def _listen(self) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.locked += line == "locked\n"
        return bool(line)

    def join(self) -> None:
        assert self._process is not None
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def outcome(study):
    return [(t.number, t.state, t.params, t.values, t.intermediate_values) for t in study.trials]


@pytest.mark.parametrize("saves", [False, True], ids=["without checkpoints", "with checkpoints"])
def test_a_database_that_is_locked_for_ten_seconds(saves, tmp_path):
    found = []
    for name in ("locked", "free"):
        folder = tmp_path / name
        folder.mkdir()
        begin(folder)
        locker = Locker(folder / "study.db")
        options = {"checkpoint_dir": folder / "saved"} if saves else {}
        with HydraExecutor(devices="cpu:1", num_shards=2, max_concurrent=3, **options) as pool:
            pruner = optuna.pruners.NopPruner()
            study = optuna.load_study(
                study_name=STUDY, storage=storage(folder), sampler=ByNumber(), pruner=pruner, executor=pool
            )
            study.optimize(build, n_trials=NUM_TRIALS, callbacks=[locker] if name == "locked" else [])
        if name == "locked":
            locker.join()
            assert locker.locked == 2
        found.append(outcome(study))
    assert found[0] == found[1]
    assert [trial[0] for trial in found[0]] == list(range(NUM_TRIALS))
    assert {trial[1] for trial in found[0]} == {TrialState.COMPLETE}
    assert [trial[2]["lr"] for trial in found[0][: len(ENQUEUED)]] == list(ENQUEUED)


AHEAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    static volatile long *seconds;
    if (!seconds) {
        const char *path = getenv("SECONDS_AHEAD");
        int file = path ? open(path, O_RDONLY) : -1;
        void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        static long none;
        seconds = found == MAP_FAILED ? &none : found;
    }
    return *seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += ahead();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    now->tv_sec += ahead();
    return result;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""

SEARCHING = """
import sys, warnings
from pathlib import Path
import optuna
from optuna.storages import RDBStorage
import hydra_tune_optuna
from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.folder import CheckpointFolder
from tests.support.killed_search import NUM_TRIALS, STUDY, ByNumber, build, storage

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
folder, number = Path(sys.argv[1]), int(sys.argv[2])
written = []
write = CheckpointFolder.write
CheckpointFolder.write = lambda self, saved: written.append(self) or write(self, saved)

def told(study, trial):
    print("told", flush=True)
    sys.stdin.readline()

kept = RDBStorage(storage(folder), heartbeat_interval=2)
options = {"checkpoint_dir": folder / f"saved {number}", "checkpoint_every": "30s"}
with HydraExecutor(devices="cpu:1", num_shards=2, max_concurrent=3, **options) as pool:
    study = hydra_tune_optuna.load_study(
        study_name=STUDY, storage=kept, sampler=ByNumber(), pruner=optuna.pruners.NopPruner(), executor=pool
    )
    study.optimize(build, n_trials=NUM_TRIALS // 2, timeout=1800, callbacks=[told])
print("checkpoints", len(written), flush=True)
"""
REPORTS = 7  # of a trial


@pytest.mark.skipif(shutil.which("cc") is None, reason="sets the clock by a small library, which it has to compile")
def test_a_clock_that_is_set_forward_an_hour(tmp_path):
    """Two processes search one study; after the first trial of each is told, it is an hour later."""
    source, library, ahead = tmp_path / "ahead.c", tmp_path / "ahead.so", tmp_path / "ahead"
    source.write_text(AHEAD)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    ahead.write_bytes(bytes(8))
    begin(tmp_path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SEARCHING, str(tmp_path), str(number)],
            cwd=ROOT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}",
                "LD_PRELOAD": str(library),
                "SECONDS_AHEAD": str(ahead),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n", process.communicate()[1]
    with ahead.open("r+b", buffering=0) as file:
        file.write((3600).to_bytes(8, "little"))
    outputs = [process.communicate("\n" * NUM_TRIALS, timeout=300) for process in processes]
    for process, (said, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        assert "The clock went forward by 3600 seconds" in errors
        checkpoints = int(said.splitlines()[-1].split()[1])
        assert checkpoints <= NUM_TRIALS // 2 * (REPORTS + 1), "one at each report, and the last state"
    trials = stock.load_study(study_name=STUDY, storage=storage(tmp_path)).trials
    assert [trial.number for trial in trials] == list(range(NUM_TRIALS))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert all(len(trial.intermediate_values) == REPORTS for trial in trials)
    took = [(trial.datetime_complete - trial.datetime_start).total_seconds() for trial in trials]
    assert sum(seconds > 3600 for seconds in took) > 0, "the clock was not set"
