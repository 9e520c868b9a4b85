"""Simplify traced graphs: remove identity nodes, and compute products in the wanted orientation and place.

`joint_graph.py` applies these passes to each new trace, before the trace runs for the first time: `tidy` first, and if the
trace has a backward, then `write_in_place` and `overwrite`, and `call_directly` last, because the other passes recognize
operators by overload. `fusion/compile/torch_compile.py` and `planner/trace/step_graph.py` take the trace as `tidy` leaves the
trace (`JointTrace.pure`). The module must not know groups, trials or plans.
"""

import torch
from torch import Tensor, fx

_SAME = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default])
_VIEWS = frozenset(
    [torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default]  # noqa: SLF001
)
_RELU, _RELU_BACKWARD = torch.ops.aten.relu.default, torch.ops.aten.threshold_backward.default
_CLONE = torch.ops.aten.clone.default
_TRANSPOSE, _SQUEEZE = torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim
_PRODUCT, _BIASED, _SUM = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, torch.ops.aten.sum.dim_IntList
_WRITTEN = {_PRODUCT: torch.ops.aten.bmm.out, _SUM: torch.ops.aten.sum.IntList_out}
_DIRECT = {
    _PRODUCT: torch.bmm,
    torch.ops.aten.bmm.out: torch.bmm,
    _BIASED: torch.baddbmm,
    _SUM: torch.sum,
    torch.ops.aten.sum.IntList_out: torch.sum,
    _TRANSPOSE: torch.transpose,
    # A kernel may lay its result out otherwise than traced (batch norm's backward does), and a view of that would fail.
    torch.ops.aten.view.default: Tensor.reshape,
    torch.ops.aten._unsafe_view.default: Tensor.reshape,  # noqa: SLF001
    torch.ops.aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.aten.expand.default: Tensor.expand,
    _RELU: torch.relu,
    torch.ops.aten.relu_.default: torch.relu_,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.ne.Scalar: torch.ne,
    torch.ops.aten.t.default: torch.t,
    torch.ops.aten.permute.default: torch.permute,
}
_MATRICES = 3


def tidy(module: fx.GraphModule) -> None:
    """Remove identity nodes, turn products whose transpose is wanted, and join a sum with the squeeze behind the sum."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target in _SAME or (node.target in _VIEWS and _are_alike(node.meta.get("val"), source.meta.get("val"))):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif node.target is _TRANSPOSE and source.target is _TRANSPOSE and _swaps_rows(node) and _swaps_rows(source):
            node.replace_all_uses_with(source.args[0])
            module.graph.erase_node(node)
        elif node.target is _TRANSPOSE and source.target in (_PRODUCT, _BIASED) and len(source.users) == 1:
            _turn(module.graph, node, source)
        # A sum without the kept dimension needs no squeeze.
        elif node.target is _SQUEEZE and _is_summed_up(source, node.args[1]):
            source.args, source.meta = source.args[:2], dict(node.meta)
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def write_in_place(module: fx.GraphModule, first: int) -> tuple[int, ...]:
    """Give a graph additional arguments, and write outputs into them.

    Args:
        module: the graph, tidied.
        first: index of the first output to write so, where a product or a sum (`_WRITTEN`) produces the output.

    Returns:
        Indices of the outputs written in place, counted from `first`.
    """
    graph = module.graph
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    *_, last_argument = graph.find_nodes(op="placeholder")
    written_indices = []
    for index, node in enumerate(outputs[first:]):
        # An output that is returned twice would need two rooms for the same value.
        if node.target not in _WRITTEN or outputs.count(node) > 1:
            continue
        with graph.inserting_after(last_argument):
            last_argument = graph.placeholder(f"room_{index}")
        with graph.inserting_before(node):
            writer = graph.call_function(_WRITTEN[node.target], node.args, {**node.kwargs, "out": last_argument})
        writer.meta = dict(node.meta)
        node.replace_all_uses_with(writer)
        graph.erase_node(node)
        written_indices.append(index)
    module.recompile()
    return tuple(written_indices)


def call_directly(module: fx.GraphModule) -> None:
    """Replace the operators of `_DIRECT` by equivalent functions of `torch`, which skip the lookup of an overload."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = _DIRECT.get(node.target, node.target)
    module.recompile()


def overwrite(module: fx.GraphModule) -> None:
    """Let rectifiers, and their backward operators, overwrite the products that no other node reads."""
    for node in module.graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.target not in (_PRODUCT, _BIASED) or len(source.users) > 1:
            continue
        if node.target is _RELU:
            node.target = torch.ops.aten.relu_.default
        # The kernel writes element by element, so source and result must have the same geometry.
        elif node.target is _RELU_BACKWARD and _are_alike(node.meta.get("val"), source.meta.get("val")):
            node.target = torch.ops.aten.threshold_backward.grad_input
            node.kwargs = {"grad_input": source}
    module.recompile()


def _is_summed_up(node: fx.Node, dimension: object) -> bool:
    """Return whether a node is a sum with a kept dimension that its only user removes."""
    return node.target is _SUM and node.args[1:] == ([dimension], True) and len(node.users) == 1


def _turn(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    """Replace the transpose of a product by the product of the transposes, which lies in memory as the result is read."""
    if not _swaps_rows(node):
        return
    *bias, left, right = product.args
    assert isinstance(left, fx.Node), "a product is of tensors"
    assert isinstance(right, fx.Node), "a product is of tensors"
    # Where the product is, because an operator behind the product may overwrite a factor.
    with graph.inserting_before(product):
        # (A B)ᵀ = Bᵀ Aᵀ, and the bias is transposed with the product.
        factors = [_transposed(graph, factor) for factor in (*bias, right, left)]  # type: ignore[arg-type]
        turned_product = graph.call_function(product.target, tuple(factors), dict(product.kwargs))  # type: ignore[arg-type]
    turned_product.meta = {"val": node.meta["val"].contiguous()}
    users = list(node.users)
    node.replace_all_uses_with(turned_product)
    graph.erase_node(node)
    graph.erase_node(product)
    if (
        len(users) == 1
        and users[0].target is _CLONE
        and _are_alike(users[0].meta.get("val"), turned_product.meta["val"])
    ):
        users[0].replace_all_uses_with(turned_product)  # a copy into the same layout
        graph.erase_node(users[0])


def _swaps_rows(node: fx.Node) -> bool:
    # Counted from the end, -1 and -2 are the rows and columns behind the members only in a tensor of three dimensions.
    return set(node.args[1:]) == {1, 2} or (set(node.args[1:]) == {-1, -2} and _dimensions(node) == _MATRICES)


def _dimensions(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is _TRANSPOSE and _swaps_rows(node):
        (source,) = node.all_input_nodes
        return source
    return graph.call_function(_TRANSPOSE, (node, 1, 2))


def _are_alike(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
