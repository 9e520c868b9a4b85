"""Python values as JSON and tensors, and back: the same types and bits, or refused by name. Nothing is unpickled.

Values without a JSON form become an object with the key `$` for their type: a tuple, a set, a non-finite float, a
tensor by name, and so on. A dict with a key `$`, or with keys other than texts, becomes such an object of pairs.
Of a Python NaN the sign and the payload are lost. `encode` returns live tensors, which the callers copy.
`train/checkpoint/trial_checkpoint.py` encodes the state of a trial at each snapshot, and decodes the state when the
trial resumes; `train/checkpoint/attribute_diff.py` encodes attributes to tell whether attributes have changed, and
`train/checkpoint/compatibility.py` copies values by encoding and decoding. A later release must decode each form written
here, and must not run code that a file names. The module must not know models, the pool or a tuner.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hydra_tune.errors import CheckpointError

_TAG = "$"
_PLAIN = (type(None), bool, int, str)


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value as JSON values, and its tensors separately.

    Args:
        value: plain values, tensors, numpy arrays, and containers of such values, to any depth.
        name: name of the value, for tensors and errors.
        tensors: receives the tensors of the value by name, as the same objects; a numpy array becomes a copy.

    Raises:
        CheckpointError: a part of the value has another type; the message names the part.
    """
    try:
        return _encoded(value, name, tensors)
    except RecursionError:
        raise CheckpointError(f"{name} cannot be saved: it contains itself, or is nested too deep") from None


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value that `encode` has encoded.

    Args:
        value: result of `encode`, perhaps after a trip through JSON.
        tensors: tensors by name; the decoded value refers to the same objects.

    Raises:
        CheckpointError: `encode` never returns such a value.
    """
    try:
        return _decoded(value, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the saved state cannot be read: {error!r}; this release did not write it") from error


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "is": str(value)}
    # Exact types only: a subclass would come back as its base class.
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encoded(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if kind is list:
        return _items(value, name, tensors)
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, name, tensors)
    is_numpy = kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc"
    if is_numpy and (kind.__name__ == "ndarray" or kind is value.dtype.type):
        # A flat copy, because torch accepts no negative strides and would share the array's memory.
        try:
            flat = torch.from_numpy(value.reshape(-1).copy())
        # Long doubles, and numbers in another byte order than the machine's.
        except (TypeError, ValueError):
            raise CheckpointError(
                f"{name} holds numpy numbers of dtype {value.dtype.str!r}, which torch and so a checkpoint cannot hold; "
                "convert them, as with .astype(numpy.float64)"
            ) from None
        is_scalar = kind is value.dtype.type
        return {_TAG: "numpy", "is": _put(flat, name, tensors), "shape": list(value.shape), "scalar": is_scalar}
    raise CheckpointError(
        f"{name} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; use numbers, texts, "
        "tensors, numpy arrays, and lists, tuples, sets and dicts of these, or train without checkpoints"
    )


def _items(values: Any, name: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [_encoded(item, f"{name}.{index}", tensors) for index, item in enumerate(values)]


def _pairs(value: Any, name: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [[_encoded(k, f"a key of {name}", tensors), _encoded(v, f"{name}.{k}", tensors)] for k, v in value.items()]


def _put(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    free_name, number = name, 1
    # Two values may have equal dotted names, as keys may contain dots.
    while free_name in tensors:
        number += 1
        free_name = f"{name}#{number}"
    tensors[free_name] = tensor
    return free_name


def _defaultdict(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    makers = {None: None, int: "int", float: "float", list: "list", dict: "dict"}
    if value.default_factory not in makers:
        raise CheckpointError(
            f"{name} is a defaultdict of {value.default_factory!r}, which cannot be saved; make it a dict"
        )
    return {_TAG: "defaultdict", "is": _pairs(value, name, tensors), "of": makers[value.default_factory]}


def _tensor_by_name(value: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    encoded = {_TAG: "tensor", "is": _put(value, name, tensors)}
    # A leaf that the user's code differentiates by; results of operators have a graph, which ends with the step.
    return encoded | {"requires_grad": True} if value.requires_grad and value.is_leaf else encoded


def _tagged(kind: str, inner: Callable[[Any, str, dict[str, Tensor]], Any]) -> Callable[..., Any]:
    return lambda value, name, tensors: {_TAG: kind, "is": inner(value, name, tensors)}


def _text(value: Any, name: str, tensors: dict[str, Tensor]) -> str:
    del name, tensors
    return str(value)


_ENCODERS: dict[type, Callable[[Any, str, dict[str, Tensor]], Any]] = {
    Tensor: _tensor_by_name,
    tuple: _tagged("tuple", _items),
    torch.Size: _tagged("size", _items),
    set: _tagged("set", _items),
    frozenset: _tagged("frozenset", _items),
    dict: _tagged("dict", _pairs),
    OrderedDict: _tagged("ordered", _pairs),
    Counter: _tagged("counter", _pairs),
    defaultdict: _defaultdict,
    deque: lambda v, name, tensors: {_TAG: "deque", "is": _items(v, name, tensors), "maxlen": v.maxlen},
    torch.dtype: _tagged("dtype", lambda v, *_: str(v).removeprefix("torch.")),
    torch.device: _tagged("device", _text),
    complex: _tagged("complex", lambda v, name, tensors: _items((v.real, v.imag), name, tensors)),
    bytes: _tagged("bytes", lambda v, *_: v.hex()),
}

_MAKERS: dict[str | None, Any] = {None: None, "int": int, "float": float, "list": list, "dict": dict}


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decoded(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    # Before the content is decoded: here `is` is a name and not a value.
    if kind in ("tensor", "numpy"):
        return _tensor(value, tensors[value["is"]])
    content = _decoded(value["is"], tensors)
    if kind == "defaultdict":
        return defaultdict(_MAKERS[value["of"]], content)
    return deque(content, maxlen=value["maxlen"]) if kind == "deque" else _DECODERS[kind](content)


def _tensor(value: Mapping[str, Any], tensor: Tensor) -> Any:
    if value[_TAG] == "tensor":
        return tensor.requires_grad_() if value.get("requires_grad") else tensor
    array = tensor.numpy().reshape(value["shape"])
    return array[()] if value["scalar"] else array


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "dtype": _dtype,
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
}
