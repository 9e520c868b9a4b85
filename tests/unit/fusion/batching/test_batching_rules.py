"""Every operator that has a form for all members does what it does for each of them alone, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_tune.fusion.batching.batching_rules import RULES, elementwise, is_elementwise
from hydra_tune.fusion.batching.embedding_rules import TABLES

MEMBERS = 3
aten = torch.ops.aten
_GENERATOR = torch.Generator()


def floats(*shape):
    return torch.randn(MEMBERS, *shape, generator=_GENERATOR, dtype=torch.float64)


def numbers(below, *shape):
    return torch.randint(below, (MEMBERS, *shape), generator=_GENERATOR)


def images(*shape):
    """As a convolution of all members leaves them in memory: their channels innermost."""
    rest = range(3, len(shape) + 1)
    inner = floats(*shape).permute(1, *rest, 0, 2).contiguous()
    return inner.permute(inner.dim() - 2, 0, inner.dim() - 1, *range(1, inner.dim() - 2))


def statistics(channels):
    return floats(channels), floats(channels).abs() + 0.5


CASES = {
    "linear": (aten.linear.default, lambda: (floats(5, 4), floats(6, 4), floats(6))),
    "linear_deep": (aten.linear.default, lambda: (floats(2, 5, 4), floats(6, 4))),
    "cross_entropy": (aten.cross_entropy_loss.default, lambda: (floats(7, 5), numbers(5, 7))),
    "cross_entropy_sum": (aten.cross_entropy_loss.default, lambda: (floats(7, 5), numbers(5, 7), None, 2)),
    "cross_entropy_each": (aten.cross_entropy_loss.default, lambda: (floats(7, 5), numbers(5, 7), None, 0)),
    "cross_entropy_ignoring": (aten.cross_entropy_loss.default, lambda: (floats(9, 5), numbers(5, 9), None, 1, 2)),
    "cross_entropy_many": (aten.cross_entropy_loss.default, lambda: (floats(7, 70), numbers(70, 7))),
    "attention": (aten.scaled_dot_product_attention.default, lambda: [floats(2, 2, 4, 3) for _ in range(3)]),
    "attention_causal": (
        aten.scaled_dot_product_attention.default,
        lambda: (*(floats(2, 2, 4, 3) for _ in range(3)), None, 0.0, True),
    ),
    "attention_masked": (
        aten.scaled_dot_product_attention.default,
        lambda: (*(floats(2, 2, 4, 3) for _ in range(3)), floats(2, 1, 4, 4)),
    ),
    "conv1d": (aten.conv1d.default, lambda: (floats(2, 3, 8), floats(4, 3, 3), floats(4), [2], [1])),
    "conv1d_same": (aten.conv1d.padding, lambda: (images(2, 3, 8), floats(4, 3, 3), None, [1], "same", [2])),
    "conv2d": (aten.conv2d.default, lambda: (floats(2, 3, 6, 5), floats(4, 3, 3, 3), floats(4), [2, 1], [1, 1])),
    "conv2d_wide": (aten.conv2d.default, lambda: (images(2, 3, 6, 5), floats(4, 3, 3, 3), None, [1, 1], [1, 1])),
    "conv2d_one_channel": (aten.conv2d.default, lambda: (floats(2, 1, 6, 5), floats(4, 1, 3, 3), floats(4))),
    "conv2d_deep": (
        aten.conv2d.padding,
        lambda: (images(2, 4, 6, 5), floats(8, 1, 3, 3), None, [1, 1], "same", [1, 1], 4),
    ),
    "conv3d": (aten.conv3d.default, lambda: (floats(2, 2, 4, 4, 3), floats(3, 2, 2, 2, 2), floats(3))),
    "turned1d": (aten.conv_transpose1d.default, lambda: (images(2, 3, 5), floats(3, 4, 3), floats(4), [2], [1])),
    "turned2d": (
        aten.conv_transpose2d.input,
        lambda: (floats(2, 4, 4, 3), floats(4, 3, 3, 3), floats(6), [2, 2], [1, 1], [1, 1], 2),
    ),
    "batch_norm": (
        aten.batch_norm.default,
        lambda: (images(4, 3, 5, 5), floats(3), floats(3), *statistics(3), True, 0.1, 1e-5, True),
    ),
    "batch_norm_1d": (
        aten.batch_norm.default,
        lambda: (floats(6, 3), floats(3), floats(3), *statistics(3), True, 0.1, 1e-5, True),
    ),
    "batch_norm_no_scales": (
        aten.batch_norm.default,
        lambda: (floats(6, 3, 4), None, None, None, None, True, 0.1, 1e-5, True),
    ),
    "batch_norm_evaluated": (
        aten.batch_norm.default,
        lambda: (floats(4, 3, 5, 5), floats(3), floats(3), *statistics(3), False, 0.1, 1e-5, True),
    ),
    "group_norm": (aten.group_norm.default, lambda: (images(2, 4, 5, 3), 2, floats(4), floats(4))),
    "group_norm_plain": (aten.group_norm.default, lambda: (floats(2, 4), 2)),
    "layer_norm": (aten.layer_norm.default, lambda: (floats(2, 5, 4), [4], floats(4), floats(4))),
    "layer_norm_2d": (aten.layer_norm.default, lambda: (floats(2, 5, 4), [5, 4], floats(5, 4))),
    "layer_norm_plain": (aten.layer_norm.default, lambda: (floats(5, 4), [4])),
    "max_pool": (aten.max_pool2d.default, lambda: (images(2, 3, 6, 6), [2, 2])),
    "avg_pool": (aten.avg_pool2d.default, lambda: (floats(2, 3, 6, 6), [3, 3], [2, 2], [1, 1])),
    "adaptive_pool": (aten.adaptive_avg_pool2d.default, lambda: (images(2, 3, 6, 6), [1, 1])),
    "upsample": (aten.upsample_nearest2d.vec, lambda: (images(2, 3, 4, 4), None, [2.0, 2.0])),
    "view": (aten.view.default, lambda: (floats(4, 6), [2, -1])),
    "flatten": (aten.flatten.using_ints, lambda: (images(2, 3, 4, 4), 1)),
    "flatten_last": (aten.flatten.using_ints, lambda: (floats(2, 3, 4), 0, -2)),
    "gelu": (aten.gelu.default, lambda: (images(2, 3, 4, 4),)),
    "add_broadcast": (aten.add.Tensor, lambda: (floats(2, 3, 4), floats(4))),
    "where": (aten.addcmul.default, lambda: (floats(2, 3), floats(3), floats(2, 1))),
}


def leaves(arguments):
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, tuple(arguments)
    )


def overwritten(target, arguments):
    """What an operator writes into may have no gradient: running statistics."""
    if target is aten.batch_norm.default:
        return (*arguments[:3], *(t if t is None else t.detach().clone() for t in arguments[3:5]), *arguments[5:])
    return arguments


def with_gradients(made, arguments, weights):
    own = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.autograd.grad((made * weights).sum(), own)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_all_members_is_the_operator_on_each(name):
    _GENERATOR.manual_seed(len(name))
    target, make = CASES[name]
    together = overwritten(target, leaves(make()))
    apart = [
        overwritten(target, leaves(pytree.tree_map_only(Tensor, lambda t, i=i: t[i].clone(), together)))
        for i in range(MEMBERS)
    ]
    rule = RULES.get(target)
    made = rule(*together) if rule is not None else elementwise(target, *together)
    alone = [target(*own) for own in apart]
    assert made is not None
    torch.testing.assert_close(made, torch.stack(alone), rtol=1e-12, atol=1e-12)
    weights = torch.randn(made.shape, generator=_GENERATOR, dtype=torch.float64)
    for found, *expected in zip(
        with_gradients(made, together, weights),
        *(with_gradients(one, own, w) for one, own, w in zip(alone, apart, weights, strict=True)),
        strict=True,
    ):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)
    for i, own in enumerate(apart):  # what is overwritten
        for a, b in zip(pytree.tree_leaves(together), pytree.tree_leaves(own), strict=True):
            if isinstance(a, Tensor) and not a.requires_grad:
                torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scales", [(), (floats(4).float(),), (floats(4).float(), floats(4).float())])
def test_a_layer_norm_of_low_precision_beside_scales_of_float32_is_rounded_once(scales):
    x = floats(5, 4).bfloat16()
    made = RULES[aten.layer_norm.default](x, [4], *scales)
    alone = [aten.layer_norm.default(x[i], [4], *(scale[i] for scale in scales)) for i in range(MEMBERS)]
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made, torch.stack(alone), rtol=2**-8, atol=0)  # a last bit


def test_what_a_convolution_makes_is_taken_as_it_lies():
    """No copies between convolution, batch norm, an elementwise operator, pooling and the next convolution."""
    conv, pool = RULES[aten.conv2d.default], RULES[aten.max_pool2d.default]
    norm = RULES[aten.batch_norm.default]
    x = conv(floats(2, 3, 6, 6), floats(4, 3, 3, 3), None, [1, 1], [1, 1])
    normed = norm(x, None, None, None, None, True, 0.1, 1e-5, True)
    pooled = pool(elementwise(aten.relu.default, normed), [2, 2])
    for made in (x, normed, pooled):
        assert made.stride(2) == 1
        assert made.stride(0) == made.size(2)


def test_elementwise_operators_that_promote_types_are_left_to_vmap():
    assert is_elementwise(aten.mul.Tensor)
    assert elementwise(aten.mul.Tensor, floats(3), numbers(4, 3)) is None


def test_classes_of_all_members_are_those_of_each():
    classes = numbers(5, 7, 2)
    assert torch.equal(RULES[aten.one_hot.default](classes, 6), aten.one_hot.default(classes, 6))


@pytest.mark.parametrize("offsets", [[2, 3], [0, 9], [0, -1]])
def test_ids_outside_of_a_members_bags_are_in_no_bag_of_anothers(offsets):
    """Torch refuses such bags; joined with others, the ids would fall into a bag of the member before."""
    begins = torch.tensor([[0, 3]] * MEMBERS)
    begins[1] = torch.tensor(offsets)
    with pytest.raises((IndexError, RuntimeError), match=r"offsets\[0\] has to be 0"):
        TABLES[aten.embedding_bag.padding_idx](floats(7, 3), numbers(7, 5), begins)


@pytest.mark.parametrize("index", [-1, 7])
@pytest.mark.parametrize(
    ("operator", "offsets"),
    [(aten.embedding.default, ()), (aten.embedding_bag.padding_idx, (torch.zeros(MEMBERS, 1),))],
)
def test_an_index_out_of_a_members_table_is_no_row_of_anothers(operator, offsets, index):
    ids = numbers(7, 4)
    ids[1, 2] = index
    with pytest.raises((IndexError, RuntimeError), match=r"index out of range|but found idx to be -1"):
        TABLES[operator](floats(7, 3), ids, *(one.long() for one in offsets))
