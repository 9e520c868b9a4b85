"""A job's record and its copies."""

from dataclasses import fields

from hydra_tune.schedule.record import JobPhase, JobRecord, JobTimeEstimate


def test_a_copy_says_the_same_and_changes_on_its_own():
    record = JobRecord(
        job="a", order=3, phase=JobPhase.READY, estimate=JobTimeEstimate(remaining_seconds=4.0), home="cpu:1", turn=7
    )
    other = record.copy()
    assert other == record
    assert {field.name for field in fields(JobRecord)} == set(JobRecord.__slots__), "or some are not copied"
    other.turn = 8
    other.estimate.tell(5.0)
    assert (record.turn, record.estimate.remaining_seconds) == (7, 4.0)
