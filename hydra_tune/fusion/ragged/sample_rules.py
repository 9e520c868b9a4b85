"""Rules for operators that compute each sample of a batch separately, and for losses that reduce over samples.

A rule is given the dimension of every value that holds the samples (None: no samples). The rule decides whether the
operator returns a value with samples in a given dimension, no sample depending on another. A dimension may hold several
positions of every sample, sample after sample. `counted_losses` (`sample_independence.py`) asks `outer_of` for operators
of `ROW_MAJOR` and a rule for others, when a group meets a second batch size, and gives the reductions of `LOSSES` to
`MaskedReduction` (`masked_loss.py`). The samples come out the same up to rounding, and padding may hold any finite value.
A rule must refuse whatever is not certain. The module must not know groups, and holds no state: any thread may ask.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hydra_tune.older_torch import is_pointwise
from hydra_tune.shard.analysis.random_ops import named_arguments

aten: Any = torch.ops.aten
_NONE = 0  # torch's number for a loss that does not reduce

Dims = Callable[[Any], Any]
"""Returns the sample dimension of a node's value; a list for a node with several values."""
_Rule = Callable[[Dims, fx.Node, dict[str, Any], Any], bool]


ROW_MAJOR = frozenset(
    # Operators that keep the elements in order and only change the dimensions.
    [
        *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    ]
)


def outer_of(node: fx.Node, dim: int, made: int | None, outer: int, samples: int) -> int | None:
    """Return how many consecutive sets of all samples a dimension holds after a row-major operator.

    Args:
        node: the operator.
        dim: dimension of the input that holds the samples.
        made: dimension of the output that holds the samples.
        outer: number of sets in `dim`.
        samples: number of samples in the batch.

    Returns:
        The number of sets; None if the dimension is not cut between samples.
    """
    if made is None:
        return None
    tensor = named_arguments(node)["self"]
    sets = math.prod(_shape(tensor)[:dim]) * outer
    num_sets, remainder = divmod(sets, math.prod(_shape(node)[:made]))
    return num_sets if not remainder and num_sets and _shape(node)[made] % (num_sets * samples) == 0 else None


def keeps_samples_apart(dims: Dims, node: fx.Node, made: Any) -> bool:
    """Return whether an operator computes each sample separately."""
    target: Any = node.target
    rule = _RULES.get(target)
    if rule is None:
        if not is_pointwise(target):
            return False
        rule = _pointwise
    return rule(dims, node, named_arguments(node), made)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _only(dims: Dims, node: fx.Node, *values: Any) -> bool:
    return all(argument in values or dims(argument) is None for argument in node.all_input_nodes)


def _beside(dims: Dims, tensors: Sequence[fx.Node], width: int) -> int | None:
    """Return the common sample dimension of tensors broadcast to `width` dimensions; None if there is none."""
    places = {(dims(t) + width - len(_shape(t)), _shape(t)[dims(t)]) for t in tensors if dims(t) is not None}
    if len(places) != 1:
        return None
    ((dim, _),) = places
    for tensor in tensors:
        tensor_dim = dim - width + len(_shape(tensor))
        if dims(tensor) is None and tensor_dim >= 0 and _shape(tensor)[tensor_dim] != 1:
            return None  # different values for each sample, but not along a recognized dimension
    return int(dim)


def _pointwise(dims: Dims, node: fx.Node, _named: dict[str, Any], made: Any) -> bool:
    return made is not None and _beside(dims, node.all_input_nodes, len(_shape(node))) == made


def _alike(_dims: Dims, _node: fx.Node, _named: dict[str, Any], _made: Any) -> bool:
    """Accept: all elements are the same number."""
    return True


def _expand(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor = named["self"]
    tensor_dim = made - len(_shape(node)) + len(_shape(tensor))
    if dims(tensor) is None:
        return bool(tensor_dim < 0 or _shape(tensor)[tensor_dim] == 1)
    return bool(dims(tensor) == tensor_dim and _shape(tensor)[tensor_dim] == _shape(node)[made])


def _same(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor = next(iter(named.values()))
    return _only(dims, node, tensor) and dims(tensor) == made


def _type_as(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    # The other tensor gives only its dtype.
    return bool(dims(named["self"]) == made)


def _transpose(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    width = len(_shape(named["self"]))
    order = list(range(width))
    dim0, dim1 = named["dim0"] % width, named["dim1"] % width
    order[dim0], order[dim1] = dim1, dim0
    return bool(order[made] == dims(named["self"]))


def _permute(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    width = len(_shape(named["self"]))
    return bool(named["dims"][made] % width == dims(named["self"]))


def _select(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    """Accept selection, `unbind` and reductions along dimensions other than the samples."""
    tensor = named["self"]
    sample_dim, width = dims(tensor), len(_shape(tensor))
    along = named.get("dim")
    along = [along] if isinstance(along, int) else along
    if sample_dim is None or not along or not _only(dims, node, tensor) or sample_dim in [dim % width for dim in along]:
        return False
    expected_dim = sample_dim if named.get("keepdim") else sample_dim - sum(dim % width < sample_dim for dim in along)
    return all(made_dim == expected_dim for made_dim in made) if isinstance(made, list) else bool(made == expected_dim)


def _along(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    """Accept operations along a preserved dimension other than the samples."""
    tensor = named["self"]
    sample_dim = dims(tensor)
    if sample_dim is None or not _only(dims, node, tensor) or sample_dim == named["dim"] % len(_shape(tensor)):
        return False
    return all(made_dim == sample_dim for made_dim in made) if isinstance(made, list) else bool(made == sample_dim)


def _slice(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor = named["self"]
    if _shape(node) == _shape(tensor) and named["step"] == 1 and named["start"] in (None, 0):
        return bool(dims(tensor) == made)  # all of it
    return _along(dims, node, named, made)


def _cat(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    # All parts must hold samples in the same dimension, and the parts must be
    # joined along another; joined samples would no longer be the leading rows.
    part_dims = {(dims(tensor), len(_shape(tensor))) for tensor in named["tensors"]}
    return part_dims == {(made, len(_shape(node)))} and made is not None and named["dim"] % len(_shape(node)) != made


def _gather(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor, index = named["self"], named["index"]
    if made is None or dims(tensor) != made or dims(index) != made or _shape(tensor)[made] != _shape(index)[made]:
        return False
    # Along the samples, an index could refer to any other sample.
    return bool(named["dim"] % len(_shape(tensor)) != made)


def _broadcast(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    """Accept tensors that already have equal shapes."""
    tensors = named["tensors"]
    return len({_shape(tensor) for tensor in tensors}) == 1 and [dims(tensor) for tensor in tensors] == made


def _linear(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    # The last dimension is summed over, so samples must lie elsewhere.
    tensor = named["input"]
    return _only(dims, node, tensor) and dims(tensor) == made and made is not None and made < len(_shape(tensor)) - 1


def _layer_norm(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor = named["input"]
    if not _only(dims, node, tensor) or dims(tensor) != made or made is None:
        return False
    # The normalized dimensions mix their elements.
    return bool(made < len(_shape(tensor)) - len(named["normalized_shape"]))


def _images(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    """Accept convolutions, pooling and group normalization of batches with samples first."""
    tensor = next(iter(named.values()))
    weight = named.get("weight")
    width = 4 if "2d" in str(node.target) else 3
    if weight is not None and "conv" in str(node.target) and len(_shape(weight)) != width:
        return False
    is_batch = len(_shape(tensor)) == width or "group_norm" in str(node.target)
    return is_batch and _only(dims, node, tensor) and dims(tensor) == 0 and made == 0


def _matmul(dims: Dims, _node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    left, right = (value for value in named.values() if isinstance(value, fx.Node))
    width = len(_shape(left))
    # A shared matrix multiplies every row alike. Two batches of matrices must both
    # hold the samples in the same outer dimension; the last two dimensions mix.
    if dims(right) is None and len(_shape(right)) == 2:  # noqa: PLR2004 - a matrix
        return dims(left) == made and made is not None and made < width - 1
    return len(_shape(right)) == width and dims(left) == dims(right) == made and made is not None and made < width - 2


def _attention(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    width = len(_shape(node))
    main = [named["query"], named["key"], named["value"]]
    if (
        made is None
        or made >= width - 2
        or any(dims(tensor) != made or len(_shape(tensor)) != width for tensor in main)
    ):
        return False
    # The mask must hold samples in the broadcast sample dimension, or be the same for all samples.
    mask = named["attn_mask"]
    return mask is None or _beside(dims, [named["query"], mask], width) == made


def _embedding(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    indices = named["indices"]  # `scale_grad_by_freq` divides by counts over the whole batch, padding included
    return _only(dims, node, indices) and dims(indices) == made and not named["scale_grad_by_freq"]


def _recurrent(dims: Dims, node: fx.Node, named: dict[str, Any], made: Any) -> bool:
    tensor, states = named["input"], named["hx"]
    states = [states] if isinstance(states, fx.Node) else list(states)
    sample_dim = 0 if named["batch_first"] else 1
    # `hx` is (layers, batch, hidden), whatever `batch_first` says.
    is_batch = len(_shape(tensor)) == 3 and dims(tensor) == sample_dim and all(dims(state) == 1 for state in states)  # noqa: PLR2004
    return is_batch and _only(dims, node, tensor, *states) and made == [sample_dim, *[1] * len(states)]


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys([aten.zeros.default, aten.ones.default, aten.full.default], _alike),
    **dict.fromkeys([aten.new_zeros.default, aten.new_ones.default], _alike),
    **dict.fromkeys([aten.zeros_like.default, aten.ones_like.default], _alike),
    aten.expand.default: _expand,
    **dict.fromkeys([aten.to.dtype, aten._to_copy.default, aten.detach.default, aten.alias.default], _same),  # noqa: SLF001
    # Dropout comes here only where nothing is drawn: `_SampleWalk` refuses operators that draw.
    **dict.fromkeys([aten.to.dtype_layout, aten.to.device, aten.contiguous.default, aten.dropout.default], _same),
    aten.type_as.default: _type_as,
    aten.copy_.default: _pointwise,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    **dict.fromkeys([aten.select.int, aten.unbind.int, aten.mean.dim, aten.sum.dim_IntList], _select),
    **dict.fromkeys([aten.amax.default, aten.amin.default, aten.argmax.default, aten.max.dim], _select),
    aten.logsumexp.default: _select,
    **dict.fromkeys([aten.softmax.int, aten.log_softmax.int, aten.cumsum.default], _along),
    **dict.fromkeys([aten.chunk.default, aten.split.Tensor], _along),
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.gather.default: _gather,
    aten.broadcast_tensors.default: _broadcast,
    aten.linear.default: _linear,
    aten.layer_norm.default: _layer_norm,
    **dict.fromkeys([aten.conv1d.default, aten.conv2d.default, aten.group_norm.default], _images),
    **dict.fromkeys([aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default], _images),
    **dict.fromkeys([aten.matmul.default, aten.bmm.default], _matmul),
    aten.scaled_dot_product_attention.default: _attention,
    aten.embedding.default: _embedding,
    **dict.fromkeys([aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input], _recurrent),
}

_Loss = Callable[[Dims, fx.Node], tuple[int, int, dict[str, Any]] | None]
"""Returns the sample dimension of the reduced tensor, torch's number of the reduction, and other arguments; None if no loss."""


def _of_classes(dims: Dims, node: fx.Node) -> tuple[int, int, dict[str, Any]] | None:
    named = named_arguments(node)
    scores, target = named["self"], named["target"]
    # Class weights change the divisor of the mean, label smoothing each sample's loss, and `MaskedReduction` knows neither.
    is_known = named["weight"] is None and not named.get("label_smoothing") and named["reduction"] != _NONE
    if not is_known or not isinstance(target, fx.Node) or target.meta["val"].is_floating_point():
        return None
    if len(_shape(scores)) != 2 or dims(scores) != 0 or dims(target) != 0 or len(_shape(target)) != 1:  # noqa: PLR2004
        return None
    return 0, named["reduction"], {"ignore_index": named["ignore_index"]}


def _of_pairs(dims: Dims, node: fx.Node) -> tuple[int, int, dict[str, Any]] | None:
    named = named_arguments(node)
    prediction, target = named.pop("self"), named.pop("target")
    reduction = named.pop("reduction")
    # A third input would be weights, which `MaskedReduction` does not know.
    if reduction == _NONE or len(node.all_input_nodes) != 2 or _shape(prediction) != _shape(target):  # noqa: PLR2004
        return None
    if dims(prediction) is None or dims(prediction) != dims(target):
        return None
    return dims(prediction), reduction, {name: value for name, value in named.items() if value is not None}


def _of_all(reduction: int) -> _Loss:
    def loss(dims: Dims, node: fx.Node) -> tuple[int, int, dict[str, Any]] | None:
        (tensor,) = node.all_input_nodes
        # `MaskedReduction` returns a sum or mean in the dtype of the values.
        if named_arguments(node)["dtype"] is not None or not tensor.meta["val"].is_floating_point():
            return None
        return dims(tensor), reduction, {}

    return loss


LOSSES: dict[Any, _Loss] = {
    **dict.fromkeys([aten.cross_entropy_loss.default, aten.nll_loss_nd.default], _of_classes),
    **dict.fromkeys([aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default], _of_pairs),
    **dict.fromkeys([aten.huber_loss.default, aten.binary_cross_entropy_with_logits.default], _of_pairs),
    aten.mean.default: _of_all(1),
    aten.sum.default: _of_all(2),
}
