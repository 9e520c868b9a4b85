"""The parts of a loader that are sent to workers: the same there, and large data without a copy for each."""

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hydra_tune.train.data import loader_workers
from hydra_tune.train.data.worker_parts import LoaderWorkerPayload, packed

LARGE = 1 << 19  # numbers of four bytes: enough to be sent beside the pickle


class Rows(Dataset[Any]):
    def __init__(self, rows: Any, count: int = 4) -> None:
        self.rows, self.count = rows, count

    def __getitem__(self, index: int) -> Any:
        self.rows.reshape(-1)[:2] += 1  # a worker's own, where it may write at all
        return torch.tensor([float(value) for value in self.rows.reshape(-1)[[0, 1, -1]]])

    def __len__(self) -> int:
        return self.count


class ReadOnly(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(value) for value in self.rows.reshape(-1)[[0, 1, -1]]])


def drawn(dataset: Dataset[Any]) -> list[Any]:
    iterator = iter(loader_workers.ready(DataLoader(dataset, num_workers=2)))
    try:
        return [batch.flatten().tolist() for batch in iterator]
    finally:
        loader_workers.end(iterator)


@pytest.mark.cases(1 / 3)
def test_a_worker_that_writes_to_a_large_array_changes_its_own():
    rows = np.arange(LARGE, dtype=np.float32)
    for _ in range(2):
        # Two workers draw two samples each, by turns.
        assert drawn(Rows(rows)) == [[1, 2, LARGE - 1], [1, 2, LARGE - 1], [2, 3, LARGE - 1], [2, 3, LARGE - 1]]
    assert rows[0] == 0


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_a_worker_that_writes_to_a_large_tensor_changes_its_own(strategy):
    usual = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        rows = torch.arange(LARGE, dtype=torch.float32)
        for _ in range(2):
            # Two workers draw two samples each, by turns.
            assert drawn(Rows(rows)) == [[1, 2, LARGE - 1], [1, 2, LARGE - 1], [2, 3, LARGE - 1], [2, 3, LARGE - 1]]
        assert rows[:2].tolist() == [0, 1]
    finally:
        torch.multiprocessing.set_sharing_strategy(usual)


class Halves(Rows):
    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__(rows, count=2)
        self.odd, self.last = rows[1::2], rows[LARGE // 2 :]

    def __getitem__(self, index: int) -> Any:
        self.rows[-1] += 10
        return torch.stack([self.odd[0], self.odd[-1], self.last[0], self.last[-1]])


def test_views_of_a_large_tensor_show_one_memory_in_a_worker():
    found = drawn(Halves(torch.arange(LARGE, dtype=torch.float32)))
    assert found == [[1, LARGE + 9, LARGE // 2, LARGE + 9]] * 2


class Item(Rows):
    def __getitem__(self, index: int) -> Any:
        self.rows[index] += 10
        return self.rows[index :: LARGE // 4]


def test_a_view_that_a_worker_returns_has_the_worker_s_writes():
    rows = torch.arange(LARGE, dtype=torch.float32)
    iterator = iter(loader_workers.ready(DataLoader(Item(rows, count=2), batch_size=None, num_workers=1)))
    try:
        for index, sample in enumerate(iterator):
            assert sample.tolist() == [index + 10, *range(LARGE // 4 + index, LARGE, LARGE // 4)]
            assert (sample.stride(), sample.untyped_storage().nbytes()) == ((LARGE // 4,), 3 * LARGE + 4)
    finally:
        loader_workers.end(iterator)
    assert rows[:2].tolist() == [0, 1]


@pytest.mark.parametrize("is_array", [False, True])
def test_workers_write_to_memory_that_the_program_shares(is_array):
    if is_array:
        rows = torch.frombuffer(multiprocessing.Array("f", LARGE).get_obj(), dtype=torch.float32)
    else:
        rows = torch.zeros(LARGE).share_memory_()
    drawn(Rows(rows))
    # Each of four samples adds 1, and two workers may add at once.
    assert rows[0] > 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, that these kinds are new
def test_tensors_with_memory_of_another_kind_reach_workers():
    dataset = Rows(torch.zeros(1))
    dataset.rows = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2)])]
    coo, csr, nested = pickle.loads(pickle.dumps(packed("dataset", dataset, "spawn", None))).rows
    assert coo.to_dense().equal(torch.eye(3))
    assert csr.to_dense().equal(torch.eye(3))
    assert nested.unbind()[0].equal(torch.ones(2))


def test_a_large_conjugate_reaches_workers_as_it_is():
    rows = torch.complex(torch.ones(LARGE), torch.ones(LARGE)).conj()
    sent = pickle.loads(pickle.dumps(packed("dataset", Rows(rows), "spawn", None))).rows
    assert sent.resolve_conj().equal(rows.resolve_conj())


def test_a_large_array_is_not_in_the_pickle_and_is_as_it_is_when_workers_start():
    rows = np.zeros(LARGE, dtype=np.float32)
    part = packed("dataset", ReadOnly(rows), "spawn", None)
    assert isinstance(part, LoaderWorkerPayload)
    assert part.num_bytes < 1000
    rows[:] = 7
    assert drawn(ReadOnly(rows, count=1)) == [[7, 7, 7]]


@pytest.mark.parametrize("part", [slice(None), slice(100, None), slice(None, None, 2)])
def test_an_array_mapped_from_a_file_is_the_same_in_workers(tmp_path, part):
    path = tmp_path / "rows.bin"
    np.arange(LARGE + 3, dtype=np.int32).tofile(path)
    rows = np.memmap(path, dtype=np.int32, mode="r", offset=12)[part]
    expected = [float(value) for value in rows[[0, 1, -1]]]
    assert drawn(ReadOnly(rows, count=1)) == [expected]


def test_an_array_mapped_from_a_file_is_not_copied(tmp_path):
    path = tmp_path / "rows.bin"
    np.arange(LARGE, dtype=np.int32).tofile(path)
    for mode in ("r", "r+"):
        rows = np.memmap(path, dtype=np.int32, mode=mode)[10:]
        part = packed("dataset", ReadOnly(rows), "spawn", None)
        assert part.num_bytes < 1000
        found = pickle.loads(pickle.dumps(part)).rows
        assert type(found) is np.memmap
        assert (found[0], found.mode, len(found)) == (10, mode, LARGE - 10)


def test_an_array_changed_beside_its_file_is_sent_as_it_is(tmp_path):
    path = tmp_path / "rows.bin"
    np.zeros(LARGE, dtype=np.int32).tofile(path)
    rows = np.memmap(path, dtype=np.int32, mode="c")
    rows[0] = 5
    assert drawn(ReadOnly(rows, count=1)) == [[5, 0, 0]]
