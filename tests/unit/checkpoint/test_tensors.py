"""Tensors in a file come back bit for bit, laid out and tied as they were; what is damaged is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hydra_tune.checkpoint.tensors import load_metadata, load_tensors, save_tensors
from hydra_tune.errors import FileError

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def same(first: Tensor, second: Tensor) -> bool:
    """Bits, not values: a NaN is itself, and -0.0 is not 0.0."""
    alike = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return alike and first.contiguous().flatten().view(torch.uint8).equal(
        second.contiguous().flatten().view(torch.uint8)
    )


def round_trip(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    save_tensors(path, tensors)
    loaded, metadata = load_tensors(path)
    assert metadata == {}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    return loaded


def share(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path):
    noise = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype): (noise % 2 if dtype == torch.bool else noise).view(dtype).clone() for dtype in DTYPES}
    round_trip(tmp_path / "t", tensors)


def test_odd_shapes_and_names(tmp_path: Path):
    round_trip(
        tmp_path / "t",
        {
            "": torch.tensor(float("nan")),
            "leer/ä.b": torch.zeros(0, 3),
            "none": torch.zeros(0),
            "minus": torch.tensor([-0.0, 0.0]),
            "parameter": nn.Parameter(torch.ones(2)),
            "byte": torch.tensor([1], dtype=torch.uint8),
            "double": torch.ones(1, dtype=torch.float64),
        },
    )
    round_trip(tmp_path / "t", {})


def test_metadata_comes_back_and_our_key_is_taken(tmp_path: Path):
    save_tensors(tmp_path / "t", {"a": torch.ones(1)}, {"x": "ü", "y": ""})
    assert load_tensors(tmp_path / "t")[1] == {"x": "ü", "y": ""}
    assert load_metadata(tmp_path / "t") == {"x": "ü", "y": ""}
    with pytest.raises(FileError, match="is reserved"):
        save_tensors(tmp_path / "t", {}, {"hydra_tune": "1"})


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path):
    weight = torch.randn(400, 300)
    loaded = round_trip(tmp_path / "t", {"a": weight, "b": weight, "c": torch.randn(3)})
    assert share(loaded["a"], loaded["b"])
    assert not share(loaded["a"], loaded["c"])
    assert (tmp_path / "t").stat().st_size < weight.nbytes * 1.1
    loaded["a"][0, 0] = 7.0
    assert loaded["b"][0, 0] == 7.0


@pytest.mark.parametrize("first", ["whole", "turned", "part", "gaps"])
def test_views_of_one_memory_are_tied_again_whoever_comes_first(tmp_path: Path, first: str):
    whole = torch.randn(4, 6)
    views = {"whole": whole, "turned": whole.t(), "part": whole[1:3], "gaps": whole[::2, ::3], "one": whole[3, 5]}
    loaded = round_trip(tmp_path / "t", {first: views[first], **views})
    loaded["whole"].zero_()
    assert not any(tensor.any() for tensor in loaded.values())


def test_overlaps_that_no_tensor_covers(tmp_path: Path):
    memory = torch.arange(10.0)
    loaded = round_trip(tmp_path / "t", {"low": memory[:6], "high": memory[4:], "wide": torch.ones(1).expand(5)})
    loaded["low"][5] = -1.0
    assert loaded["high"][1] == -1.0
    assert loaded["wide"].stride() == (0,)


@pytest.mark.parametrize("has_memory", [False, True])
def test_elements_that_overlap_with_gaps_between_them_come_back(tmp_path: Path, has_memory: bool):
    memory = torch.arange(4.0)
    round_trip(tmp_path / "t", {"overlapping": memory[::3].expand(2, 2)} | ({"memory": memory} if has_memory else {}))


def test_parts_of_one_buffer_that_do_not_overlap_are_untied(tmp_path: Path):
    """As the parameters of a shard lie in its flat buffer: the file holds them, not the buffer."""
    buffer = torch.randn(100_000)
    loaded = round_trip(tmp_path / "t", {"a": buffer[:10], "b": buffer[10:30].view(4, 5)})
    assert not share(loaded["a"], loaded["b"])
    assert (tmp_path / "t").stat().st_size < 2000


def test_strides_come_back(tmp_path: Path):
    image = torch.randn(2, 3, 4, 5)
    round_trip(tmp_path / "t", {"last": image.to(memory_format=torch.channels_last), "turned": torch.randn(3, 4).t()})


def test_the_library_reads_our_files_and_we_read_the_librarys(tmp_path: Path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.ones(3, dtype=torch.uint8),
        "c": torch.randn(2, 3, 2, 2, dtype=torch.float64),
    }
    tensors["c"] = tensors["c"].to(memory_format=torch.channels_last)
    save_tensors(tmp_path / "ours", tensors)
    assert all(load_file(tmp_path / "ours")[name].equal(tensor) for name, tensor in tensors.items())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"k": "v"})
    loaded, metadata = load_tensors(tmp_path / "theirs")
    assert metadata == {"k": "v"}
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on the meta device"),
        ({"an": "extra state"}, "of dict"),
        (torch.ones(2, dtype=torch.complex128), "of torch.complex128"),
    ],
)
def test_what_the_format_has_not_is_refused(tmp_path: Path, tensor: object, what: str):
    with pytest.raises(FileError, match=f"'x' is {what}"):
        save_tensors(tmp_path / "t", {"x": tensor})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(tmp_path: Path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(FileError, match="'x' is nested, but the format stores only dense tensors"):
        save_tensors(tmp_path / "t", {"x": nested})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["__metadata__", "hydra_tune.memory_of.0"])
def test_names_that_the_file_needs_itself_are_refused(tmp_path: Path, name: str):
    with pytest.raises(FileError, match=rf"tensor name '{name}' is reserved"):
        save_tensors(tmp_path / "t", {name: torch.ones(2)})
    assert not list(tmp_path.iterdir())


def test_shared_memory_of_two_dtypes_is_refused(tmp_path: Path):
    weight = torch.ones(4)
    with pytest.raises(FileError, match="'a', 'b' share memory and differ in dtype"):
        save_tensors(tmp_path / "t", {"a": weight, "b": weight.view(torch.int32)})


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path: Path):
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 2).t()}
    save_tensors(tmp_path / "t", tensors, {"epoch": "3"})
    whole = (tmp_path / "t").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "t").write_bytes(whole[:length])
        with pytest.raises(FileError, match="the file is damaged or of another kind") as caught:
            load_tensors(tmp_path / "t")
        assert caught.value.path == str(tmp_path / "t")
    name = range(
        whole.index(b"hydra_tune"), whole.index(b"hydra_tune") + 10
    )  # without it, the file is another program's
    for at in sorted({*range(len(whole))} - {*name}):
        (tmp_path / "t").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(FileError, match=r"damaged|expected format"):
            load_tensors(tmp_path / "t")


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(100), b"hello" * 100])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(FileError, match=f"got {len(content)} bytes"):
        load_tensors(tmp_path / "t")


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ("no json", "a description of views that fits the tensors"),
        ("[]", "a description of views that fits the tensors"),
        (json.dumps({"format": 2}), "expected format 1, got 2"),
        (json.dumps({"format": 1, "crc32": 0, "views": {}}), "checksum 00000000, got"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path: Path, own: str, what: str):
    save_file({"a": torch.ones(2)}, tmp_path / "t", {"hydra_tune": own})
    with pytest.raises(FileError, match=what):
        load_tensors(tmp_path / "t")


def test_a_file_that_cannot_be_read_names_errno(tmp_path: Path):
    with pytest.raises(FileError, match="No such file") as caught:
        load_tensors(tmp_path / "nowhere")
    assert caught.value.errno == 2
    with pytest.raises(FileError, match="Is a directory"):
        load_tensors(tmp_path)
