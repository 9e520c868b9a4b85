"""What two trials may not train at once, and what they may share."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, Reported
from hydra_tune.errors import TaskError
from hydra_tune.pool.faults import loader_watchdog
from hydra_tune.train.claims import TrialClaim
from tests.support.hanging import hanging, have_others_not_age
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, against_plain, one_batch, running, task


@pytest.fixture
def claims():
    """Claims that end with the test."""
    made = []

    def claim(module):
        made.append(TrialClaim(module))
        return made[-1]

    yield claim
    for one in made:
        one.give_up()


def test_a_module_is_one_trials(claims):
    module = nn.Linear(2, 2)
    first = claims(module)
    with pytest.raises(TaskError, match="returned a module that another trial is training"):
        claims(module)
    first.give_up()
    claims(module)


def test_a_claim_reads_nothing_of_another_trials_module(claims):
    """The thread of that trial may be writing the module's attributes at the same time."""
    module = nn.Linear(2, 2)
    claims(module)
    attributes = dict(vars(module))
    vars(module).clear()
    claims(nn.Linear(2, 2))
    vars(module).update(attributes)


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_module_whose_trial_was_pruned_trains_on_as_in_a_plain_loop_or_not_at_all(num_shards):
    """One parameter, as the memory that several parameters of a lost module share is refused for another reason."""
    shared = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    again = task(model=lambda: shared, epochs=3)
    with running(num_shards=num_shards) as pool:
        stream = pool.events()
        job = pool.submit(again, events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        job.prune()
        assert job.result().status == "pruned"
        pruned = copy.deepcopy(shared)
        result = pool.submit(again).result()
    if num_shards is None:
        assert against_plain(task(model=lambda: pruned, epochs=3), result) == []
    else:
        assert isinstance(result.error, TaskError)
        assert "parameter '0.weight' of the module that model= returned has lost its values" in str(result.error)


def test_a_module_whose_trial_was_pruned_trains_again_with_other_memory():
    shared = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    fresh = copy.deepcopy(shared)

    def again():
        for parameter, value in zip(shared.parameters(), fresh.parameters(), strict=True):
            parameter.data = value.detach().clone()
        return shared

    with running(num_shards=2) as pool:
        stream = pool.events()
        job = pool.submit(task(model=again, epochs=3), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        job.prune()
        assert job.result().status == "pruned"
        result = pool.submit(task(model=again)).result()
    assert against_plain(task(model=lambda: copy.deepcopy(fresh)), result) == []


def test_a_parameter_in_two_modules_is_refused_by_name(claims):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.bias = first.bias
    claims(first)
    with pytest.raises(TaskError, match=r"parameter 'bias' .* shares memory with 'bias' of a trial under way"):
        claims(second)


def test_a_tensor_that_two_parameters_are_made_of_is_refused(claims):
    weights = torch.randn(2, 2)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.weight, second.weight = nn.Parameter(weights), nn.Parameter(weights)
    claims(first)
    first.weight.data = weights.clone()  # as a pool takes the bytes over
    with pytest.raises(TaskError, match="parameter 'weight'"):
        claims(second)


def test_what_nobody_trains_may_be_shared(claims):
    vectors = torch.randn(4, 2)
    claims(nn.Embedding.from_pretrained(vectors, freeze=True))
    claims(nn.Embedding.from_pretrained(vectors, freeze=True))
    with pytest.raises(TaskError, match="parameter 'weight'"):
        claims(nn.Embedding.from_pretrained(vectors, freeze=False))


def test_memory_that_has_been_freed_claims_nothing(claims):
    for _ in range(50):
        module = nn.Linear(64, 64)
        claims(module)
        for parameter in module.parameters():
            parameter.data = torch.empty(0)
        del module


def test_an_optimizer_is_one_trials(claims):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    first, second = claims(module), claims(nn.Linear(2, 2))
    first.take(optimizer)
    with pytest.raises(TaskError, match="returned an optimizer that another trial is using"):
        second.take(optimizer)


@pytest.mark.parametrize("fusion", ["off", "on"])
def test_trials_of_a_pool_that_share_a_parameter_fail_by_name_and_the_first_one_trains(fusion):
    shared = nn.Parameter(torch.randn(4, 8))

    def model():
        module = nn.Linear(8, 4)
        module.weight = shared
        return module

    held = Held()
    with running(fusion=fusion, max_concurrent=2, instrument=held) as pool:
        first, second = (pool.submit(task(model=model, seed=seed)) for seed in (3, 4))
        failed = second.result(PATIENCE_SECONDS)  # the first is still there
        held.go()
        assert first.result(PATIENCE_SECONDS).status == "completed"
    assert isinstance(failed.error, TaskError)
    assert "'weight'" in str(failed.error)


def test_one_after_the_other_may_train_the_same():
    module = nn.Linear(8, 4)
    with HydraExecutor(devices="cpu:1", max_concurrent=1) as pool:
        results = pool.run([task(model=lambda: module, optimizer=partial(torch.optim.SGD, lr=0.1))] * 2)
    assert [result.status for result in results] == ["completed"] * 2


def test_one_that_follows_a_trial_whose_loader_is_slow_may_train_the_same(monkeypatch):
    monkeypatch.setattr(loader_watchdog, "_PATIENCE_SECONDS", 0.05)
    have_others_not_age(monkeypatch)
    entered, attempts, is_asked, is_ending = TrialClaim._entered, [], threading.Event(), []

    def counted(claim, module):
        try:
            return entered(claim, module)
        finally:
            attempts.append(claim)
            if len(attempts) == 2:
                is_asked.set()

    def batches():
        yield from one_batch()
        with hanging():
            assert is_asked.wait(PATIENCE_SECONDS)
        yield from one_batch() * 2
        is_ending.append(pool._pool._records[first.key].trial._claimed.is_ending)

    monkeypatch.setattr(TrialClaim, "_entered", counted)
    module = nn.Linear(8, 4)
    with running(max_concurrent=1) as pool:
        first = pool.submit(task(model=lambda: module, train=batches, epochs=1))
        second = pool.submit(task(model=lambda: module))
        assert [job.result(PATIENCE_SECONDS).status for job in (first, second)] == ["completed"] * 2
    assert is_ending == [False]
