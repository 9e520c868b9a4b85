"""What is made of a crash, and of many."""

import pickle
import signal
from pathlib import Path

from hydra_tune.errors import TrialCrashedError
from hydra_tune.supervision.supervisor import CrashHistory, numbered

DUMP = """Fatal Python error: Segmentation fault

Thread 0x00000000000000aa (most recent call first):
  File "wait.py", line 1 in wait

Current thread 0x00000000000000bb (most recent call first):
  File "deep.py", line 7 in inner
  File "net.py", line 12 in step
  File "loop.py", line 3 in run
  File "far.py", line 9 in main

Extension modules: numpy
"""


def test_the_thread_of_the_fault_is_to_blame():
    history = CrashHistory()
    said = history.note({0xAA: "trial 1", 0xBB: "trial 2"}, "SIGSEGV", DUMP)
    where = "it was in inner (deep.py:7), called by step (net.py:12), called by run (loop.py:3)"
    assert said == f"the pool's process was ended by SIGSEGV while trial 2 was at work; {where}"
    assert (history.counts, history.suspects, history.aside) == ({"trial 2": 1}, set(), {})
    said = history.note({0xBB: "trial 2"}, "SIGSEGV", DUMP)
    assert said.endswith("as before; it is set aside")
    error = history.aside["trial 2"]
    assert isinstance(error, TrialCrashedError)
    assert (error.name, error.crashes, error.how) == ("trial 2", 2, f"SIGSEGV; {where}")


def test_of_several_nobody_is_blamed_until_one_is_alone():
    history = CrashHistory()
    said = history.note({1: "trial 1", 2: "trial 2"}, "SIGKILL", "")
    assert (
        said
        == "the pool's process was ended by SIGKILL while trial 1, trial 2 were at work; they run one at a time now"
    )
    assert (history.counts, history.suspects) == ({}, {"trial 1", "trial 2"})
    history.note({1: "trial 2"}, "SIGKILL", "")
    assert history.aside == {}
    history.note({1: "trial 2", 7: "trial 2"}, "SIGKILL", "")  # two threads of one trial
    assert history.aside.keys() == {"trial 2"}


def test_a_fault_in_a_thread_of_no_trial_blames_a_trial_only_when_that_runs_alone():
    history = CrashHistory()
    said = history.note({0xAA: "trial 1"}, "SIGSEGV", DUMP)
    assert "trial 1 was at work; it runs alone now; it was in inner (deep.py:7)" in said
    assert (history.counts, history.suspects) == ({}, {"trial 1"})
    history.note({0xAA: "trial 1"}, "SIGSEGV", DUMP)
    history.note({0xAA: "trial 1"}, "SIGSEGV", DUMP)
    assert history.aside.keys() == {"trial 1"}


def test_crashes_with_no_trial_at_work_are_counted_on_end():
    history = CrashHistory()
    said = history.note({}, f"signal {signal.SIGUSR1.value}", "")
    assert said == "the pool's process was ended by signal 10, while no trial was at work"
    assert history.blank == 1
    history.note({1: "trial 1"}, "SIGKILL", "")
    assert (history.blank, history.crashes) == (0, 2)


def test_an_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(TrialCrashedError("trial 3", 2, "SIGSEGV")))
    assert (error.name, error.crashes, error.how) == ("trial 3", 2, "SIGSEGV")
    assert str(error) == str(TrialCrashedError("trial 3", 2, "SIGSEGV"))


def test_each_process_has_a_log_of_its_own():
    assert numbered(None, 3) is None
    assert numbered(Path("runs/a.jsonl"), 0) == Path("runs/a.jsonl")
    assert numbered(Path("runs/a.jsonl"), 2) == Path("runs/a-3.jsonl")
