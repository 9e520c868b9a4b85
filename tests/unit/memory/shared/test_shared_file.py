"""Tensors in one file: each user sees the others' bytes and nobody's writes."""

import gc

import pytest
import torch
from torch import nn

from hydra_tune.errors import HydraTuneError
from hydra_tune.memory.shared import shared_file
from hydra_tune.memory.shared.shared_file import SharedFile, digest_of, shared_source


@pytest.fixture
def tensors():
    return {
        "wide": torch.arange(3000.0).reshape(60, 50),
        "half": torch.arange(7).bfloat16(),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "flags": torch.tensor([True, False]),
    }


@pytest.fixture(params=["page map", "comparison"])
def way(request, monkeypatch):
    """Writes are found by the system's page map, and where there is none by a comparison."""
    if request.param == "comparison":
        monkeypatch.setattr(shared_file, "_PAGE_MAP", "/nowhere")
    return request.param


def test_mapped_tensors_have_the_bytes_strides_and_storages_of_tensors_of_their_own(tensors, way):
    file = SharedFile(tensors)
    for name, tensor in file.mapped().items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.stride() == tensors[name].stride()
        assert tensor.untyped_storage().nbytes() == tensors[name].numel() * tensors[name].element_size()
        assert shared_source(tensor) is file.tensors[name]
        assert digest_of(tensor) == digest_of(tensors[name]) == file.tensors[name].digest


@pytest.mark.parametrize(
    "write",
    [lambda tensor: tensor.add_(1), lambda tensor: tensor.data.zero_(), lambda tensor: tensor.numpy().fill(2)],
    ids=["in place", "past the version", "by numpy"],
)
def test_a_write_of_any_kind_shows_to_its_writer_alone(tensors, way, write):
    file = SharedFile(tensors)
    writer, reader = file.mapped(), file.mapped()
    write(writer["wide"])
    assert shared_source(writer["wide"]) is None
    assert not torch.equal(writer["wide"], tensors["wide"])
    assert shared_source(writer["turned"]) is file.tensors["turned"]
    for others in (reader, file.mapped()):
        assert torch.equal(others["wide"], tensors["wide"])
        assert shared_source(others["wide"]) is file.tensors["wide"]


def test_a_mapping_made_while_another_ends_stays_shared(tensors, monkeypatch):
    file, later = SharedFile(tensors), []
    forget = shared_file._forget

    def late(*arguments):
        # The old memory is gone, so the system gives its addresses to the new mapping.
        later.append(file.mapped())
        forget(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shared_file, "_forget", late)
        earlier = file.mapped()
        patch.setattr(shared_file, "_forget", forget)
        del earlier
        gc.collect()
    (mapped,) = later
    for name, tensor in mapped.items():
        assert shared_source(tensor) is file.tensors[name]


def test_other_tensors_come_from_no_file(tensors):
    mapped = SharedFile(tensors).mapped()
    assert shared_source(nn.Parameter(mapped["wide"])) is not None
    assert shared_source(mapped["wide"].clone()) is None
    assert shared_source(mapped["wide"][:3]) is None
    assert shared_source(mapped["wide"].view(torch.int32)) is None
    assert shared_source(torch.empty(0)) is None


def test_a_file_and_its_addresses_go_with_the_last_tensor(tensors):
    gc.collect()
    before = len(shared_file._SOURCES)
    file = SharedFile(tensors)
    kept = file.mapped()["half"]
    del file
    assert len(shared_file._SOURCES) == before + len(tensors)
    assert torch.equal(kept, tensors["half"])
    del kept
    assert len(shared_file._SOURCES) == before


def test_a_host_without_room_refuses_the_file(tensors, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_file.os, "posix_fallocate", full)
    with pytest.raises(HydraTuneError, match=r"finds no host memory: \[Errno 28\]"):
        SharedFile(tensors)
