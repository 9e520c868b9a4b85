"""A trial draws from copies of its own, and says why where it cannot have them."""

import contextlib
import copy
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Sampler, StackDataset, TensorDataset

from hydra_tune.checkpoint.values import decode, encode
from hydra_tune.errors import CheckpointError, TaskError
from hydra_tune.train.data.data_feed import TrialDataFeed
from hydra_tune.train.data.loader_copies import TrialLoaderCopies
from tests.unit.pool.tasks import X, against_plain, one_batch, short, task, train

ROWS = TensorDataset(torch.arange(10))


def feed(batch_size=None) -> TrialDataFeed:
    return TrialDataFeed(batch_size, contextlib.nullcontext)


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_the_users_loader_sampler_and_generator_stay_as_they_were():
    stream = seeded()
    loader = DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, generator=stream), generator=stream)
    before = dict(vars(loader)), stream.get_state()
    drawn = feed()
    passes = [rows(drawn.draw(loader, shuffle=True)) for _ in range(2)]
    assert dict(vars(loader)) == before[0]
    assert torch.equal(stream.get_state(), before[1])
    assert passes == [rows(loader), rows(loader)]


def test_what_two_loaders_share_their_copies_share():
    own, stream = TrialLoaderCopies(), seeded()
    one = own.loader(DataLoader(ROWS, 4, shuffle=True, generator=stream))
    other = own.loader(DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, generator=stream)))
    assert one.generator is other.sampler.generator is not stream
    assert one.batch_sampler.sampler is one.sampler
    assert one.dataset is other.dataset is other.sampler.data_source is ROWS


def test_a_copy_lives_no_longer_than_its_original():
    own, loader = TrialLoaderCopies(), DataLoader(ROWS, 4, shuffle=True)
    assert own.loader(loader) is own.loader(loader)
    del loader
    assert own._copies == {}


def two_kinds() -> list[Any]:
    """Callables that return the same loader each time: one that is shuffled, one that is drawn from."""
    shuffled = DataLoader(ROWS, 4, shuffle=True, generator=seeded())
    some = DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, num_samples=4, generator=seeded()))
    return [lambda: shuffled, lambda: some]


def begun(handles: list[Any]) -> TrialDataFeed:
    made = feed()
    for handle in handles:
        made.check(handle)
    return made


def test_positions_are_each_handles_whichever_is_drawn_first():
    handles, others = two_kinds(), two_kinds()
    drawn, resumed = begun(handles), begun(others)
    for handle in handles:
        rows(drawn.draw(handle, shuffle=True))
    resumed.restore(drawn.states())
    expected = [rows(drawn.draw(handle, shuffle=True)) for handle in handles]
    assert [rows(resumed.draw(handle, shuffle=True)) for handle in reversed(others)] == expected[::-1]


def test_positions_that_still_wait_are_saved_again():
    handles, others, last = two_kinds(), two_kinds(), two_kinds()
    drawn, between, resumed = begun(handles), begun(others), begun(last)
    for handle in handles:
        rows(drawn.draw(handle, shuffle=True))
    between.restore(drawn.states())
    # Only the first handle's copies exist now.
    expected = rows(drawn.draw(handles[0], shuffle=True)), rows(drawn.draw(handles[0], shuffle=True))
    assert rows(between.draw(others[0], shuffle=True)) == expected[0]
    resumed.restore(between.states())
    assert rows(resumed.draw(last[0], shuffle=True)) == expected[1]
    assert rows(resumed.draw(last[1], shuffle=True)) == rows(drawn.draw(handles[1], shuffle=True))


def test_positions_of_an_older_checkpoint_go_by_the_order_of_creation():
    handles, others, last = two_kinds(), two_kinds(), two_kinds()
    drawn, resumed, again = begun(handles), begun(others), begun(last)
    for handle in handles:
        rows(drawn.draw(handle, shuffle=True))
    older = [position for positions in drawn.states()["by_handle"] for position in positions]
    expected = [rows(drawn.draw(handle, shuffle=True)) for handle in handles]
    resumed.restore(older)
    assert rows(resumed.draw(others[0], shuffle=True)) == expected[0]
    again.restore(resumed.states())
    assert rows(resumed.draw(others[1], shuffle=True)) == expected[1]
    rows(again.draw(last[0], shuffle=True))
    assert rows(again.draw(last[1], shuffle=True)) == expected[1]


class CountsPasses(Sampler[int]):
    """Another order in each pass, from how many there were; the last one is kept."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self):
        self.kept = [(row * 3 + self.passes) % 10 for row in range(10)]
        self.passes += 1
        return iter(self.kept)


def test_a_position_of_before_the_first_pass_is_gone_back_to_from_within():
    """A position names what differs from the user's own sampler, which is nothing at first."""
    made = feed()
    loader = DataLoader(ROWS, 4, sampler=CountsPasses())
    made.check(loader)
    at_the_beginning = made.states()
    expected = rows(made.draw(loader, shuffle=True))
    made.restore(at_the_beginning)
    assert not hasattr(made._own.loader(loader).sampler, "kept")
    assert rows(made.draw(loader, shuffle=True)) == expected


@pytest.mark.parametrize("order", [np.arange(9, -1, -1), torch.arange(10), {3, 5, 8}], ids=["array", "tensor", "set"])
def test_indices_of_any_kind_have_no_position(order):
    drawn, resumed, loader = feed(), feed(), DataLoader(ROWS, 4, sampler=order)
    expected = rows(drawn.draw(loader, shuffle=True))
    encode(drawn.states(), "feed", {})
    resumed.check(loader)
    resumed.restore(copy.deepcopy(drawn.states()))
    assert rows(resumed.draw(loader, shuffle=True)) == expected


class Noisy(Dataset[Any]):
    """Adds noise from a stream of its own."""

    def __init__(self, seed: int) -> None:
        self.noise = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return index + self.noise.random()


@pytest.mark.parametrize(
    "data",
    [
        ConcatDataset([Noisy(0), [7.0, 8.0], Noisy(1)]),
        StackDataset(Noisy(0), Noisy(1)),
        StackDataset(one=Noisy(0), other=Noisy(1)),
    ],
    ids=["list", "tuple", "dict"],
)
def test_streams_of_datasets_in_a_container_are_the_trials_own(data):
    drawn, resumed, loader = feed(), feed(), DataLoader(data, 4)
    first = repr(list(drawn.draw(loader, shuffle=True)))
    assert repr(list(feed().draw(loader, shuffle=True))) == first
    position = encode(drawn.states(), "feed", tensors := {})
    second = repr(list(drawn.draw(loader, shuffle=True)))
    resumed.check(loader)
    resumed.restore(decode(position, tensors))
    assert repr(list(resumed.draw(loader, shuffle=True))) == second != first


def test_datasets_may_refer_to_each_other():
    whole = ConcatDataset([Noisy(0), Noisy(1)])
    for part in whole.datasets:
        part.whole = whole
    loader = DataLoader(whole, 4, sampler=HoldsData(whole))
    assert repr(list(feed().draw(loader, shuffle=True))) == repr(list(feed().draw(loader, shuffle=True)))


class Seeds(Dataset[Any]):
    """Keeps the seeds that its workers would spawn theirs from."""

    def __init__(self) -> None:
        self.seeds = np.random.SeedSequence(5)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return (index,)


def test_seeds_have_no_position_until_they_spawn_others():
    drawn, resumed, loader = feed(), feed(), DataLoader(Seeds(), 4)
    for each in (drawn, resumed):
        each.check(loader)
    encode(drawn.states(), "feed", {})
    resumed.restore(drawn.states())
    drawn._own.loader(loader).dataset.seeds.spawn(1)
    with pytest.raises(CheckpointError, match="SeedSequence, which a checkpoint cannot hold"):
        encode(drawn.states(), "feed", {})


class HoldsData(Sampler[int]):
    def __init__(self, data: Dataset[Any], **more: Any) -> None:
        self.data, self.order, self.more = data, [0, 1, 2], more

    def __iter__(self):
        self.order.append(self.order.pop(0))
        return iter(self.order)


def test_a_sampler_of_the_users_own_is_copied_down_to_the_data():
    loader = DataLoader(ROWS, 4, sampler=HoldsData(ROWS, table=ROWS.tensors))
    drawn = feed()
    assert [rows(drawn.draw(loader, shuffle=True)) for _ in range(2)] == [[[1, 2, 0]], [[2, 0, 1]]]
    assert loader.sampler.order == [0, 1, 2]
    copied = TrialLoaderCopies().loader(loader).sampler
    assert copied.data is ROWS
    assert copied.more["table"] is ROWS.tensors


def test_an_attribute_that_a_sampler_and_the_users_code_both_change_is_named(caplog):
    loader = DataLoader(ROWS, 4, sampler=HoldsData(ROWS))
    drawn = feed()
    assert rows(drawn.draw(loader, shuffle=True)) == [[1, 2, 0]]
    for order in ([7, 8, 9], [4, 5, 6]):
        loader.sampler.order = order
        passed = rows(drawn.draw(loader, shuffle=True))
    assert passed == [[0, 1, 2]]
    assert caplog.text.count("'order' of the sampler HoldsData") == 1


def test_a_changed_sampler_goes_back_with_its_position():
    loader = DataLoader(ROWS, 4, sampler=HoldsData(ROWS, kept=1))
    drawn, resumed = feed(), feed()
    drawn.check(loader)
    loader.sampler.more["kept"] = 2
    list(drawn.draw(loader, shuffle=True))
    assert drawn._own.loader(loader).sampler.more == {"kept": 2}
    resumed.check(loader)
    resumed.restore(copy.deepcopy(drawn.states()))
    assert rows(resumed.draw(loader, shuffle=True)) == rows(drawn.draw(loader, shuffle=True)) == [[2, 0, 1]]
    loader.sampler.more = {"kept": 3}
    list(resumed.draw(loader, shuffle=True))
    assert resumed._own.loader(loader).sampler.more == {"kept": 3}


def test_a_sampler_that_cannot_be_copied_is_refused_before_training():
    loader = DataLoader(ROWS, 4, sampler=HoldsData(ROWS, lock=threading.Lock()))
    with pytest.raises(TaskError, match=r"sampler HoldsData cannot be copied: .*lock.*__deepcopy__"):
        feed().check(loader)


def test_a_loader_that_keeps_an_iterator_is_refused():
    loader = DataLoader(ROWS, 4)
    loader.kept = iter(loader)
    with pytest.raises(TaskError, match=r"keeps an iterator in 'kept'.*persistent_workers=True"):
        feed().check(loader)


def test_a_used_up_iterator_is_named():
    batches = iter(one_batch())
    result = train(short(train=lambda: batches, epochs=2))
    assert isinstance(result.error, TaskError)
    assert "train yielded no batch in epoch 1" in str(result.error)
    assert "not an iterator that an earlier pass, or another trial, has used up" in str(result.error)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"generator": seeded()}, "a generator"),
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers=True"),
    ],
)
def test_a_loader_that_a_callable_draws_from_is_named_once_where_a_pass_changes_the_loader(caplog, options, named):
    changed, same = DataLoader(ROWS, 4, shuffle=True, **options), DataLoader(ROWS, 4, shuffle=True)
    for _ in range(2):
        for handle in (lambda: itertools.islice(changed, 1), lambda: itertools.islice(same, 1), lambda: changed):
            TrialLoaderCopies().batches(handle, None, shuffle=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"reads the variable 'changed', a DataLoader with {named}, and does not return the loader" in caplog.text
    assert "make the loader in the callable" in caplog.text


def test_a_global_loader_that_a_callable_draws_from_is_named(caplog):
    names: dict[str, Any] = {"loader": DataLoader(ROWS, 4, generator=seeded()), "islice": itertools.islice}
    exec("drawn = lambda: islice(loader, 1)", names)
    TrialLoaderCopies().batches(names["drawn"], None, shuffle=True)
    assert "reads the variable 'loader'" in caplog.text


class Lengthless(Sampler[int]):
    def __iter__(self):
        return iter(range(16))


class OfWrongLength(torch.utils.data.IterableDataset[Any]):
    def __iter__(self):
        return iter([(row, 1) for row in X])

    def __len__(self):
        return 3


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, torch.ones(24, dtype=torch.int64)), 8, sampler=Lengthless()),
        DataLoader(OfWrongLength(), 8),
    ],
    ids=["none", "wrong"],
)
def test_a_length_that_is_unknown_or_wrong_breaks_no_figure(loader):
    described = task(train=loader, epochs=3, report_every=2)
    assert against_plain(described, train(described)) == []
