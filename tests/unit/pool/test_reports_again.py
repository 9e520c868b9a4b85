"""A job that begins again passes the reports that its driver has answered, and its log says so."""

from types import SimpleNamespace

from hydra_tune.pool.runtime.job_state import JobState, ReportCursor
from hydra_tune.train.trial import PendingReport


def test_a_report_that_was_answered_before_is_logged_as_one_that_waits_for_nobody():
    logged = []
    log = SimpleNamespace(job=lambda key, what, **facts: logged.append((key, what, facts["step"], facts["waits"])))
    job = SimpleNamespace(key="0:trial", name="trial", state="running")
    record = JobState(job, lambda error: None, log, repeats=ReportCursor(step=0, is_answered=True))
    reports = [PendingReport(step=step, metrics={"val_loss": 1.0}) for step in range(2)]
    record.trial = SimpleNamespace(advance=iter(reports).__next__)
    assert record.advance(report_is_free=False) is reports[1]
    assert logged == [("0:trial", "report", 0, False), ("0:trial", "report", 1, True)]
