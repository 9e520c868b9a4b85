"""What the program makes of the words of a pool's process, and of the next one's."""

import pickle
from multiprocessing import Pipe

import pytest

from hydra_tune import EventStream, Finished, Reported, Result
from hydra_tune.isolation.child import IsolatedPoolServer
from hydra_tune.isolation.parent import IsolatedPoolClient, _IsolatedJob
from hydra_tune.isolation.sending import packed_result, unpacked_result
from hydra_tune.pool.job import Job
from hydra_tune.supervision import marks
from hydra_tune.supervision.supervisor import RestartContext

HISTORY = [{"step": step, "epoch": step, "seconds": 1.0 + step, "train_loss": 0.5 - step} for step in range(4)]


def losses(step):
    return {"train_loss": 0.5 - step}


class Steered:
    """One job, and the process's end of the wire."""

    def __init__(self, **options):
        self.pool = IsolatedPoolClient(lambda _: pytest.fail("no process is begun"))
        self.stream = EventStream()
        self.job = Job(key="0:a", name="a", task=None, pool=self.pool, events=self.stream)
        entry = _IsolatedJob(job=self.job, task=b"task", name="a", options={"resume_from": None} | options)
        self.pool._entries["0:a"] = entry
        self.attach()

    def attach(self):
        ours, self.wire = Pipe()
        self.pool._attach(ours)

    def reports(self, step):
        self.pool._obey("reported", "0:a", step, losses(step), tuple(HISTORY[: step + 1]))

    def words(self):
        found = []
        while self.wire.poll():
            found.append(self.wire.recv())
        return found

    def events(self):
        found = []
        while (event := self.stream.get(timeout=0)) is not None:
            found.append(event)
        return found


def test_a_process_is_sent_what_is_not_over_with_what_was_left_of_it(tmp_path):
    one = Steered()
    assert one.words() == [("submit", "0:a", b"task", "a", {"resume_from": None}, True, None)]
    assert one.job.state == "running"
    one.pool._obey("placed", "0:a", tmp_path)
    one.attach()
    assert one.words() == [("submit", "0:a", b"task", "a", {"resume_from": None}, True, tmp_path)]


def test_a_report_is_told_once_whatever_crashes():
    one = Steered()
    one.reports(0)
    assert one.events() == [Reported(one.job, 0, losses(0))]
    one.attach()  # crashed while the driver had not answered: the job waits there once more, or has gone on
    one.reports(0)
    assert (one.events(), one.job.state) == ([], "waiting")
    one.job.proceed()
    one.attach()  # crashed before it was saved: the job reports again, and is answered at once
    one.words()
    one.reports(0)
    assert (one.words(), one.events(), one.job.state) == ([("proceed", "0:a")], [], "running")


def test_reports_that_were_saved_and_never_told_are_told_with_the_next():
    one = Steered()
    one.reports(0)
    one.job.proceed()
    one.attach()
    one.reports(2)
    told = one.events()
    assert told[1:] == [Reported(one.job, 1, losses(1)), Reported(one.job, 2, losses(2))]
    assert one.job.state == "waiting"
    one.attach()
    one.pool._obey("over", "0:a", packed_result(Result(status="cancelled", history=HISTORY), {}))
    missed, end = one.events()
    assert missed == Reported(one.job, 3, losses(3))
    assert isinstance(end, Finished)


def test_reports_of_before_the_job_was_submitted_are_nobodys():
    one = Steered(resume_from="there")
    one.attach()
    one.reports(2)
    assert one.events() == [Reported(one.job, 2, losses(2))]


def test_what_was_to_be_ended_is_not_begun_again():
    one = Steered()
    one.reports(0)
    one.words()
    one.job.prune()
    assert one.words() == [("pruned", "0:a")]
    one.attach()
    assert one.words() == []
    result = one.job.result(0)
    assert (result.status, result.history, result.metrics) == ("pruned", HISTORY[:1], losses(0))


def test_an_end_of_the_process_is_told_without_a_cause_that_nobody_knows():
    one = Steered()
    one.pool._end()
    assert str(one.job.result(0).error) == (
        "the pool's process has ended and is not restarted; its output and the log say more"
    )


MARKED: list[dict[int, str]] = []


class UnsendableError(Exception):
    """Notes the trials to blame for a crash of its own code."""

    def __reduce__(self):
        MARKED.append(marks.here().marked())
        raise self


class Unreadable:
    def __reduce__(self):
        return _raised, ()


def _raised():
    raise UnsendableError("not to be read")


def test_an_error_is_packed_under_the_mark_of_its_trial(monkeypatch):
    """A crash in the error's own code was blamed on nobody, and the second ended the pool."""
    monkeypatch.setattr(marks, "_HERE", None)
    marks.TrialMarkTable().begin(())
    ours, wire = Pipe()
    pool = IsolatedPoolServer(ours, {}, RestartContext(), lambda: pytest.fail("no pool is begun"))
    MARKED.clear()
    pool._submit(None, "0:a", pickle.dumps(Unreadable()), "a", {}, True, None)
    word, key, packed = wire.recv()
    result = unpacked_result(packed, None, {})
    assert (word, key, result.status, str(result.error)) == ("over", "0:a", "failed", "UnsendableError: not to be read")
    assert [set(marked.values()) for marked in MARKED] == [{"a"}]
