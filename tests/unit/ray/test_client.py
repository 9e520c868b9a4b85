"""A trial begins in another pool, or waits for the directory, where Ray has lost one of them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

from hydra_tune_ray import client
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.messages import BeginReply, BeginRequest, MoveOutcome, ReportOutcome, TrialTicket
from hydra_tune_ray.version import VERSION

AWAY = ActorUnavailableError("its node does not answer", None)
GONE = ActorUnschedulableError("its node is gone")
REPORT = ReportOutcome(number=1, step=0, metrics={}, is_last=False)


def actor(**methods):
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


def directory(*places):
    """One that answers so, in turn."""
    answers = iter(places)
    return actor(version=lambda: VERSION, place=lambda *args: next(answers))


def pool(**answers):
    """One whose methods answer so, in turn."""
    turns = {name: iter(values) for name, values in answers.items()}
    asked = []

    def call(method, *args, **options):
        asked.append((method, *args))
        return next(turns[method])

    return SimpleNamespace(asked=asked, **vars(actor(call=call)))


@pytest.fixture
def begun(monkeypatch):
    """Begins a trial among these actors."""

    def get(answer, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def begun(actors, ticket=None):
        def find_actor(name):
            if name not in actors:
                raise ValueError(f"no {name}")
            return actors[name]

        monkeypatch.setattr(client, "find_actor", find_actor)
        trial = client.TrialClient(
            "pools-x", BeginRequest(trial_id="t", key="k", name="t", build=b"", config={}), "digest"
        )
        trial.begin(ticket)
        return trial

    monkeypatch.setattr(client, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(client.ray, "get", get)
    monkeypatch.setattr(client.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(client.threading, "Thread", lambda **options: SimpleNamespace(start=lambda: None))
    return begun


def ticket(trial):
    return TrialTicket(pool=trial, key="k0", number=1, config="digest")


def test_a_directory_that_ray_restarts_is_waited_for(begun):
    a = pool(begin=[BeginReply(line="")])
    begun({"pools-x": directory(AWAY, AWAY, "a"), "a": a})
    assert len(a.asked) == 1


def test_a_directory_that_never_answers_is_an_error(begun, monkeypatch):
    monkeypatch.setattr(client, "_PLACE_SECONDS", -1.0)
    with pytest.raises(PoolError, match=r"the pools of this trial are gone .* does not answer"):
        begun({"pools-x": directory(AWAY)})


@pytest.mark.parametrize("error", [GONE, ActorDiedError()])
def test_a_trial_whose_pool_is_lost_begins_in_another(begun, error):
    a, b = pool(begin=[error]), pool(begin=[BeginReply(line="")])
    begun({"pools-x": directory("b"), "a": a, "b": b}, ticket("a"))
    assert [len(a.asked), len(b.asked)] == [1, 1]


def test_a_trial_whose_pool_has_no_name_any_more_begins_in_another(begun):
    b = pool(begin=[BeginReply(line="")])
    begun({"pools-x": directory("a", "b"), "b": b}, ticket("a"))
    assert len(b.asked) == 1


def test_a_trial_moves_elsewhere_if_the_other_pool_is_lost(begun):
    a = pool(begin=[BeginReply(line="")], next=[MoveOutcome(pool="b", files="its files")])
    b, c = pool(begin=[GONE]), pool(begin=[BeginReply(line="")], next=[REPORT])
    trial = begun({"pools-x": directory("a", "c"), "a": a, "b": b, "c": c})
    assert trial.next_report() is REPORT
    assert c.asked[0][1].files == "its files"


def test_a_trial_that_has_begun_fails_with_its_pool(begun):
    a = pool(begin=[BeginReply(line="")], next=[GONE])
    trial = begun({"pools-x": directory("a"), "a": a})
    with pytest.raises(PoolError, match=r"has died.*its node is gone.*max_failures"):
        trial.next_report()


def test_pools_that_are_lost_one_after_another_are_an_error(begun, monkeypatch):
    monkeypatch.setattr(client, "_LOST_SECONDS", -100.0)
    with pytest.raises(PoolError, match="has died"):
        begun({"pools-x": directory("a"), "a": pool(begin=[GONE])})
