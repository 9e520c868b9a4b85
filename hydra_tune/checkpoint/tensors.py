"""Tensors in a safetensors file, and back bit for bit: shapes, strides, and shared memory.

Any reader of safetensors reads the files; reading never runs code. This module writes the files itself, because the
library holds the whole file in memory or writes under a name of its own, without flushing, and loses errno. The library
does the reading, because the library validates its input. The module must not know models, the pool or a tuner. `folder.py`
saves and loads checkpoints through this module, `best.py` saves weights during a search, and `Result.save`
(`train/trained.py`), `load_module` (`train/checkpoint/weights.py`), `hydra-tune best` and `hydra-tune export`
(`cli/run/export.py`) save or load weights. `integrations/hydra_tune_optuna/weights.py` reads the metadata alone.

Note: stored data. Tensors whose ranges of memory overlap form a group, stored once: as the member that covers the whole
range without gaps, else as a flat stretch under a separate name. Every other member, and a member with strides other than
a contiguous tensor's, is a *view*: shape, strides and offset in the stored tensor. Views are in the metadata under
`hydra_tune`, with a checksum of everything in the file.
"""

import contextlib
import ctypes
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hydra_tune.checkpoint.direct import written_directly
from hydra_tune.checkpoint.files import file_error, replacing
from hydra_tune.errors import FileError

_OWN_KEY = "hydra_tune"
_FORMAT = 1
_STRETCH = f"{_OWN_KEY}.memory_of."
"""Prefix of the names of stored memory ranges that are not tensors themselves."""
_METADATA = "__metadata__"  # the format has the file's texts under this name
_PIECE_BYTES = 8 * 2**20

# https://github.com/huggingface/safetensors: the names of the format
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


@dataclass(frozen=True, slots=True)
class _StoredTensorView:
    """Position of a tensor in a stored tensor's memory; strides and offset in elements."""

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _TensorStorageSpan:
    """A tensor and the elements of its storage that it may touch, from `start` to before `end`."""

    name: str
    tensor: Tensor
    start: int
    end: int


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, overwrite: bool = True
) -> None:
    """Write tensors to a file, atomically; tensors on devices are copied to the host one at a time.

    Args:
        path: path of the file; its folder exists already.
        tensors: tensors by name, with any strides and any shared memory. The tensors must not change meanwhile. The name
            "__metadata__", and names that begin with "hydra_tune.memory_of.", are reserved.
        metadata: texts returned by `load_tensors`; the name "hydra_tune" is reserved.
        overwrite: whether an existing file is replaced.

    Raises:
        FileError: the file cannot be written (as of `replacing`), or the format does not support a tensor's kind, or tensors
            of several dtypes share memory, or a name is reserved.
    """
    # Conjugation and negation are lazy flags of a tensor that raw bytes would lose.
    plain_tensors = {
        name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in _checked(path, tensors).items()
    }
    stored, layout = _layout(path, plain_tensors)
    views = {name: asdict(view) for name, view in layout.items()}
    if metadata is not None and _OWN_KEY in metadata:
        raise FileError(
            f"cannot write {str(path)!r}: metadata name {_OWN_KEY!r} is reserved; choose another",
            path=str(path),
            errno=None,
        )
    description = {"format": _FORMAT, "crc32": _checksum(stored, metadata or {}, views), "views": views}
    header = _header(stored, {**(metadata or {}), _OWN_KEY: json.dumps(description)})
    with replacing(path, overwrite=overwrite) as file, written_directly(file) as writer:
        writer.write(header)
        for tensor in stored.values():
            for piece in _pieces(tensor):
                writer.write(piece)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file from `save_tensors`, or any other safetensors file.

    Returns:
        The tensors on the host, with memory shared as when saved and otherwise separate, and the metadata.

    Raises:
        FileError: the file cannot be read, is not safetensors, or is damaged.
    """
    with _opened(path) as file:
        metadata = _metadata(file)
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - the file is no dict
    description = metadata.pop(_OWN_KEY, None)
    if description is None:
        return stored, metadata
    try:
        return _restored(path, stored, metadata, json.loads(description)), metadata
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _damaged(path, f"a description of views that fits the tensors, got {error!r}") from error


def load_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file without its tensors; unlike `load_tensors`, check no checksum.

    Raises:
        FileError: the file cannot be read, or is not safetensors.
    """
    with _opened(path) as file:
        metadata = _metadata(file)
    metadata.pop(_OWN_KEY, None)
    return metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        # The library reports neither errno nor a folder in place of a file.
        with path.open("rb") as probe:
            probe.read(1)
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise file_error("read", path, error) from error
    except SafetensorError as error:
        raise _damaged(path, f"a whole safetensors file, got {path.stat().st_size} bytes with: {error}") from error


def _metadata(file: Any) -> dict[str, str]:
    return dict(file.metadata() or {})


def _checked(path: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name, tensor in tensors.items():
        if name == _METADATA or name.startswith(_STRETCH):
            raise FileError(
                f"cannot write {str(path)!r}: tensor name {name!r} is reserved; rename the tensor",
                path=str(path),
                errno=None,
            )
        unfit = _unfit(tensor)
        if unfit is not None:
            raise FileError(
                f"cannot write {str(path)!r}: {name!r} is {unfit}, but the format stores only dense tensors of "
                f"{', '.join(_NAMES.values())}; convert it",
                path=str(path),
                errno=None,
            )
    return tensors


def _unfit(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"of {type(tensor).__name__}"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    if tensor.device.type == "meta":
        return "on the meta device, without values"
    return f"of {tensor.dtype}" if tensor.dtype not in _NAMES else None


def _layout(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, _StoredTensorView]]:
    """Return the stored tensors, contiguous and in file order, and the views of all other tensors."""
    stored: dict[str, Tensor] = {}
    views: dict[str, _StoredTensorView] = {}
    for group in _groups(tensors):
        if len({span.tensor.dtype for span in group}) > 1:
            names = ", ".join(repr(span.name) for span in group)
            raise FileError(
                f"cannot write {str(path)!r}: {names} share memory and differ in dtype; clone one",
                path=str(path),
                errno=None,
            )
        _lay_out(group, stored, views)
    return dict(_in_file_order(stored)), views


def _in_file_order(stored: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Order tensors so that each starts at a multiple of its element size, as readers that map files require."""
    return sorted(stored.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[_TensorStorageSpan]]:
    """Yield groups of tensors whose ranges overlap, directly or through others; each list in memory order."""
    by_storage: dict[object, list[_TensorStorageSpan]] = {}
    for name, tensor in tensors.items():
        start = tensor.storage_offset()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start if tensor.numel() == 0 else start + steps + 1
        span = _TensorStorageSpan(name, tensor, int(start), int(end))
        # Empty tensors share no memory, and their data pointers may be equal by accident.
        key = name if tensor.numel() == 0 else (tensor.device, tensor.untyped_storage().data_ptr())
        by_storage.setdefault(key, []).append(span)
    for spans in by_storage.values():
        group: list[_TensorStorageSpan] = []
        reach = 0
        # In memory order, a gap between the ranges so far and the next range ends a group.
        for span in sorted(spans, key=_bytes_from):
            if group and _bytes_from(span) >= reach:
                yield group
                group = []
            group.append(span)
            reach = max(reach, span.end * span.tensor.element_size())
        yield group


def _bytes_from(span: _TensorStorageSpan) -> int:
    return span.start * span.tensor.element_size()


def _lay_out(group: list[_TensorStorageSpan], stored: dict[str, Tensor], views: dict[str, _StoredTensorView]) -> None:
    start, end = min(span.start for span in group), max(span.end for span in group)
    base = next((span for span in group if span.end - span.start == end - start and _is_gapless(span.tensor)), None)
    # No member covers the whole memory without gaps.
    if base is None:
        name = _STRETCH + group[0].name
        stored[name] = group[0].tensor.as_strided((end - start,), (1,), start).contiguous()
    else:
        name, tensor = base.name, base.tensor
        stored[name] = tensor if tensor.is_contiguous() else tensor.contiguous()
    for span in group:
        tensor = span.tensor
        # A contiguous base is stored as it is, for any reader of the format; every other member needs a view.
        if span is not base or not tensor.is_contiguous():
            views[span.name] = _StoredTensorView(name, tuple(tensor.shape), tuple(tensor.stride()), span.start - start)


def _is_gapless(tensor: Tensor) -> bool:
    """Whether a tensor has each element of its memory once."""
    return tensor.numel() == 0 or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _checksum(stored: Mapping[str, Tensor], metadata: Mapping[str, str], views: Mapping[str, Any]) -> int:
    """Return a checksum of everything in a file, names and texts included."""
    in_order = _in_file_order(stored)
    kinds = [(name, _NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in in_order]
    checksum = zlib.crc32(json.dumps([kinds, metadata, views], sort_keys=True).encode())
    for _, tensor in in_order:
        for piece in _pieces(tensor):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _header(stored: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, tensor in stored.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format pads its header to 8 bytes, so tensor data starts aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor from the host, piece by piece."""
    on_host = tensor.cpu()
    size = on_host.numel() * on_host.element_size()
    if size == 0:
        return
    # By ctypes, because numpy may not be installed and cannot hold bfloat16.
    whole = memoryview((ctypes.c_ubyte * size).from_address(on_host.data_ptr()))
    for offset in range(0, size, _PIECE_BYTES):
        yield whole[offset : offset + _PIECE_BYTES]


def _restored(
    path: Path, stored: Mapping[str, Tensor], metadata: Mapping[str, str], own: dict[str, Any]
) -> dict[str, Tensor]:
    if own["format"] != _FORMAT:
        raise FileError(
            f"cannot read {str(path)!r}: expected format {_FORMAT}, got {own['format']!r}; read it with the "
            f"release of hydra-tune that wrote it",
            path=str(path),
            errno=None,
        )
    checksum = _checksum(stored, metadata, own["views"])
    if checksum != own["crc32"]:
        raise _damaged(path, f"checksum {own['crc32']:08x}, got {checksum:08x}")
    views = {name: _StoredTensorView(**view) for name, view in own["views"].items()}
    # One tensor for each stored range: all of its views must share memory, as when they were saved.
    memory = {view.of: _in_place(stored[view.of], views.get(view.of)) for view in views.values()}
    tensors = {name: memory.get(name, tensor) for name, tensor in stored.items() if not name.startswith(_STRETCH)}
    for name, view in views.items():
        tensors[name] = memory[view.of].as_strided(view.shape, view.strides, view.offset)
    return tensors


def _in_place(tensor: Tensor, own_view: _StoredTensorView | None) -> Tensor:
    if own_view is None:
        return tensor
    return torch.empty_strided(own_view.shape, own_view.strides, dtype=tensor.dtype).copy_(tensor)


def _damaged(path: Path, expected: str) -> FileError:
    return FileError(
        f"cannot use {str(path)!r}: expected {expected}; the file is damaged or of another kind: restore it from a "
        f"copy, or remove it and save again",
        path=str(path),
        errno=None,
    )
