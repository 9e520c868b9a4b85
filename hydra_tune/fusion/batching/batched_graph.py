"""`StackedGraph`: run a captured graph on stacked members, with a single call per node where possible.

Every value is either stacked, with the members in front, or shared by all members (derived from constants alone). A
node with only shared inputs that draws no random numbers runs once. A node with stacked inputs runs by its own rule
(`batching_rules.py` and others), or else under `torch.vmap`; a node that draws random numbers runs by `batched_random.drawn`
or `batched_random.masks`. An operator for which no such form works runs once for each member (`per_member_fallback.py`).
Regions such as `torch.no_grad()` also run node by node. `stacked_plan` (`fusion/compile/batched_plan.py`) makes a
`StackedGraph` of each shard when a group's plan is made; `fusion/ragged/multi_head_graph.py` makes a `StackedGraph` of the
beginning and of each head. Units of a group, and traces (`batched/joint_graph.py`), call the graph. The module must not know
trials, groups or pools.

Note: bits. No operator may mix members: a NaN of one member must leave the others' bits alone. The order of the forms (rule,
vmap, each member alone) is part of the numbers, because forms round differently.

Note: memory. A value is freed after its last use, because peak memory is planned without it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hydra_tune.batched.batched_random import drawn, masks
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.aliasing_writes import MemoryWrites, named
from hydra_tune.fusion.batching.batching_rules import RULES, VIEWS, elementwise, is_elementwise
from hydra_tune.fusion.batching.embedding_rules import TABLES, embedding_bag
from hydra_tune.fusion.batching.per_member_fallback import apart, has_batched_form
from hydra_tune.fusion.batching.random_decomposition import recorded
from hydra_tune.fusion.batching.rnn_rules import RECURRENT
from hydra_tune.fusion.batching.stacked_autocast import dtypes_of, has_recurrent_kernel, member_dtypes, prepared
from hydra_tune.fusion.ragged.masked_loss import LOSS, MaskedReduction, counted_loss
from hydra_tune.shard.analysis.random_ops import draws_random_numbers, is_foreign
from hydra_tune.shard.capture.graph_device import moved, names_a_device
from hydra_tune.task import Precision

_CHECKS = frozenset([torch.ops.aten._assert_tensor_metadata.default])  # noqa: SLF001 - true for every batch of the kind
_APART = frozenset(
    # Composite operators that decompose into operators without a batching rule in `torch.vmap`.
    f"aten::{name}"
    for name in ("embedding_bag", "ctc_loss", "lstm", "gru", "rnn_tanh", "rnn_relu", "multilabel_margin_loss")
) | frozenset(
    # Under `torch.vmap` a negative index, or one out of range, fills rows of another member.
    ["aten::index_fill", "aten::index_fill_"]
)
_BY_STRIDES = frozenset(f"aten::as_strided{suffix}" for suffix in ("", "_", "_copy", "_scatter"))
_ALL_RULES = RULES | RECURRENT | TABLES
_DROPOUT = frozenset([torch.ops.aten.dropout.default, torch.ops.aten.scaled_dot_product_attention.default])
"""Operators that draw masks by the dropout kernel of GPUs; dropout of channels and in-place dropout use another kernel."""
_IS_DROPOUT = "is dropout"
_OWN_DRAWS = frozenset(RECURRENT)  # rules that draw their own random numbers
_Run = Callable[[int, Sequence[Any], dict[str, Any]], Any]
"""Evaluates a node: (number of members, arguments, keywords) -> value."""


@dataclass(frozen=True, slots=True)
class _StackedCall:
    """A node ready to run; `is_placed` tells whether an argument names a device."""

    node: fx.Node
    run: _Run
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    last_uses: tuple[fx.Node, ...]
    is_placed: bool


class StackedGraph:
    """Runs a graph for all members.

    Args:
        module: the graph, captured for a single member.
        is_stacked: for every argument, whether the argument has the members in front.
        slots: names of dropout nodes with a separate probability for each member.

    Raises:
        UnfusableError: a node cannot run on stacked members; the message names the node.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        is_stacked: Sequence[bool],
        slots: frozenset[str] = frozenset(),
        precision: Precision = "float32",
    ) -> None:
        self._module = module
        self._precision: Precision = precision
        self._stacked: set[fx.Node] = set()
        self._arguments: list[fx.Node] = []
        self._planned: list[tuple[fx.Node, _Run, tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: tuple[fx.Node, ...] = ()
        self._bodies: dict[fx.Node, Any] = {}
        self._slots = slots
        self._gradients: bool | None = None  # grad mode of the region being added; None outside any region
        flags = iter(is_stacked)
        for node in module.graph.nodes:
            self._add(node, flags)
        calls = [(node, arguments, keywords) for node, _, arguments, keywords in self._planned]
        writes = MemoryWrites(calls, self._arguments, self._outputs)
        self._overwritten = writes.overwritten
        if writes.hidden is not None:
            raise UnfusableError(
                f"{_told(writes.hidden)} overwrites a view whose base is read later, and stacked trials may lie "
                "otherwise in memory"
            )
        # Device and number of members are read off the first stacked argument.
        self._first = list(is_stacked).index(True)
        self._calls = self._with_last_uses()

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return the graph's outputs, all with the members in front."""
        count, place = arguments[self._first].size(0), arguments[self._first].device
        values: dict[fx.Node, Any] = dict(zip(self._arguments, arguments, strict=True))
        for call in self._calls:
            inputs = (call.arguments, call.keywords)
            # Plans are captured on the CPU; a device named in the
            # graph must become the device that the members are on.
            if call.is_placed and place.type != "cpu":
                inputs = moved(inputs, place)
            positional = [fx.node.map_arg(argument, values.__getitem__) for argument in inputs[0]]
            keywords = {name: fx.node.map_arg(value, values.__getitem__) for name, value in inputs[1].items()}
            values[call.node] = call.run(count, positional, keywords)
            # The list would keep values alive past their last use, and peak memory is planned without them.
            positional.clear()
            for node in call.last_uses:
                del values[node]
        return tuple(
            values[node] if node in self._stacked else _expanded(values[node], count) for node in self._outputs
        )

    def _add(self, node: fx.Node, flags: Any) -> None:
        if node.op == "placeholder":
            self._arguments.append(node)
            if next(flags):
                self._stacked.add(node)
        elif node.op == "output":
            (self._outputs,) = node.args  # type: ignore[assignment]
        elif node.op == "get_attr":
            self._bodies[node] = getattr(self._module, str(node.target))
        elif node.op == "call_function" and node.target not in _CHECKS:
            self._add_operation(node, {})

    def _add_operation(self, node: fx.Node, placed: Mapping[fx.Node, Any]) -> None:
        """Add a node of the graph or of a region; `placed` has the nodes or values that stand for nodes of a region."""
        arguments: Any = fx.node.map_arg(node.args, lambda n: self._bodies.get(n, placed.get(n, n)))
        keywords: Any = fx.node.map_arg(node.kwargs, lambda n: self._bodies.get(n, placed.get(n, n)))
        draws = draws_random_numbers(node)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self._add_region(node, *arguments)
        elif not draws or node.target in _OWN_DRAWS:
            self._add_call(node, arguments, keywords)
        elif is_foreign(node.target):
            raise UnfusableError(
                f"{_told(node)} may draw random numbers in code that cannot be run for all trials at once"
            )
        elif (record := recorded(node, self._precision)) is not None:
            self._add_draw(node, record, [placed.get(argument, argument) for argument in node.all_input_nodes])
        else:
            self._stacked.add(node)
            self._check_memory(node, arguments, keywords)
            self._plan(node, self._apart(node.target, arguments, keywords, draws=True), arguments, keywords)

    def _add_draw(self, node: fx.Node, record: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        placed: dict[fx.Node, Any] = {}
        input_nodes = iter(inputs)
        for primitive in record.nodes:
            if primitive.op == "placeholder":
                placed[primitive] = None if primitive.name == "generator" else next(input_nodes)
            elif primitive.op == "output":
                self._alias(node, placed[primitive.args[0]])
            elif node.name in self._slots and "generator" in primitive.kwargs:
                placed[primitive] = primitive
                self._stacked.add(primitive)
                is_dropout = node.target in _DROPOUT
                (like,) = fx.node.map_arg(primitive.args[:1], placed.__getitem__)
                self._planned.append(
                    (
                        primitive,
                        _masks(node.name, primitive.meta["val"].stride(), is_dropout, like in self._stacked),
                        (like,),
                        {},
                    )
                )
            elif node.name in self._slots and primitive.target is torch.ops.aten.div_.Scalar:
                # `batched_random.masks` scales already, each member by its own probability.
                placed[primitive] = placed[primitive.args[0]]
            else:
                arguments = fx.node.map_arg(primitive.args, placed.__getitem__)
                keywords = {key: fx.node.map_arg(value, placed.__getitem__) for key, value in primitive.kwargs.items()}
                placed[primitive] = primitive
                primitive.meta[_IS_DROPOUT] = node.target in _DROPOUT
                self._add_call(primitive, arguments, keywords, is_cast=True)

    def _add_region(self, node: fx.Node, enabled: bool, body: fx.GraphModule, *operands: fx.Node) -> None:
        """Add a region written under `torch.no_grad()` or `torch.enable_grad()`."""
        inner = fx.Graph()
        # Fresh nodes, since a graph may call the same region twice.
        result = inner.graph_copy(body.graph, {})
        inner.owning_module = body
        operand_nodes, placed = iter(operands), {}
        # Regions may be nested: the innermost mode counts.
        outer, self._gradients = self._gradients, enabled
        for element in inner.nodes:
            if element.op == "placeholder":
                placed[element] = next(operand_nodes)
            elif element.op == "get_attr":
                self._bodies[element] = getattr(body, str(element.target))
            elif element.target not in _CHECKS:
                self._add_operation(element, placed)
        self._gradients = outer
        values: Any = fx.node.map_arg(result, lambda n: placed.get(n, n))
        are_stacked = [leaf in self._stacked for leaf in values]
        # `getitem` passes on a single flag, so a region's results are stacked all together or not at all.
        if any(are_stacked):
            self._stacked.add(node)

        def run(count: int, found: Sequence[Any], _keywords: dict[str, Any]) -> Any:
            pairs = zip(found[0], are_stacked, strict=True)
            return tuple(
                element if is_stacked or not any(are_stacked) else _expanded(element, count)
                for element, is_stacked in pairs
            )

        self._planned.append((node, run, (tuple(values),), {}))

    def _alias(self, node: fx.Node, value: fx.Node) -> None:
        if value in self._stacked:
            self._stacked.add(node)
        self._planned.append((node, lambda _count, found, _keywords: found[0], (value,), {}))

    def _add_call(
        self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], *, is_cast: bool = False
    ) -> None:
        """Add a call; `is_cast` says that the casts of autocast have nodes of their own."""
        target: Any = node.target
        if target is operator.getitem:
            if arguments[0] in self._stacked:
                self._stacked.add(node)
            self._planned.append((node, lambda _count, found, _keywords: found[0][found[1]], arguments, keywords))
            return
        if target is counted_loss:
            self._stacked.add(node)
            run = _counting(node.meta[LOSS], self._stacked_leaves(arguments, {}), self._precision)
            self._planned.append((node, run, arguments, {}))
            return
        self._check_dense(node, arguments, keywords)
        if "generator" in keywords:
            # Each member's own generator takes the place of the recorded argument.
            keywords = {key: value for key, value in keywords.items() if key != "generator"}
            self._stacked.add(node)
            is_stacked = [self._is_stacked(argument) for argument in arguments]
            is_dropout = node.meta.get(_IS_DROPOUT, False)
            strides = torch.empty_like(node.args[0].meta["val"]).stride() if is_stacked[0] else None  # type: ignore[union-attr]
            run = _drawing(target, is_stacked, strides, is_dropout=is_dropout)
        elif self._is_stacked((arguments, keywords)):
            self._stacked.add(node)
            self._check_memory(node, arguments, keywords)
            is_low = target in RECURRENT and self._precision != "float32"
            run = (self._recurrent if is_low else self._for_all)(node, arguments, keywords)
        # A fresh shared tensor that a later node fills in place with
        # members' values needs a separate copy for each member.
        elif _is_made_to_be_overwritten(node):
            self._stacked.add(node)
            run = _once(target, expands=True)
        else:
            run = _once(target, expands=False)
        self._plan(node, run, arguments, keywords, is_cast=is_cast)

    def _plan(
        self, node: fx.Node, run: _Run, arguments: tuple[Any, ...], keywords: dict[str, Any], *, is_cast: bool = False
    ) -> None:
        run = _under(run, enabled=self._gradients)
        if self._precision != "float32" and not is_cast:
            run = _in_precision(run, node.target, self._stacked_leaves(arguments, keywords), self._precision)
        self._planned.append((node, run, arguments, keywords))

    def _for_all(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Run:
        target: Any = node.target
        by_itself = self._apart(target, arguments, keywords, draws=False)
        if not isinstance(target, OpOverload):
            return by_itself
        are_stacked = self._stacked_leaves(arguments, keywords)
        rule = self._rule_of(node)
        # A rule may decline by returning None, and `torch.vmap` may fail for some arguments. The
        # order is rule, vmap, then each member alone; a failed vmap is not tried again for the node.
        is_batched = has_batched_form(target) and target._schema.name not in _APART  # noqa: SLF001
        keeps_dtypes = self._dtype_check(target, are_stacked)

        def run(count: int, found: Sequence[Any], given: dict[str, Any]) -> Any:
            """Compute the node for all members: by its rule, else by `torch.vmap`, else for each member alone."""
            nonlocal is_batched
            if rule is not None:
                flags = iter(are_stacked)
                # Autograd refuses writes into the result of a function with a backward of its own (`settled`).
                options = {"settles": False} if target in VIEWS and node in self._overwritten else {}
                expanded_arguments = pytree.tree_map_only(
                    Tensor, lambda t: t if next(flags) else _expanded(t, count), (tuple(found), given)
                )
                result = rule(*expanded_arguments[0], **expanded_arguments[1], **options)
                if result is not None and keeps_dtypes(result, found, given):
                    return result
            if is_batched:
                try:
                    result = _mapped(target, found, given, are_stacked)
                except RuntimeError as error:
                    # Running out of memory says nothing about batching
                    # rules; the pager must see the error and retry the unit.
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    is_batched = False
                else:
                    if keeps_dtypes(result, found, given):
                        return result
                    is_batched = False
            return by_itself(count, found, given)

        return run

    def _recurrent(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Run:
        """Return a run of recurrent layers in low precision, where torch's kernels round otherwise than cells do."""
        target: Any = node.target
        rule, are_stacked = self._rule_of(node), self._stacked_leaves(arguments, keywords)
        assert rule is not None, "recurrent layers have rules"
        by_itself = self._apart(target, arguments, keywords, draws=draws_random_numbers(node))
        has_kernel: bool | None = None

        def run(count: int, found: Sequence[Any], given: dict[str, Any]) -> Any:
            nonlocal has_kernel
            if has_kernel is None:
                has_kernel = has_recurrent_kernel(target, found, given, are_stacked)
            if not has_kernel:
                flags = iter(are_stacked)
                expanded_arguments = pytree.tree_map_only(
                    Tensor, lambda t: t if next(flags) else _expanded(t, count), found
                )
                return rule(*expanded_arguments, **given)
            if node.name in self._slots:
                raise UnfusableError(
                    f"{_told(node)} is one kernel in low precision, which takes a single probability of dropout"
                )
            return by_itself(count, found, given)

        return run

    def _dtype_check(
        self, target: Any, are_stacked: Sequence[bool]
    ) -> Callable[[Any, Sequence[Any], dict[str, Any]], bool]:
        """Return a function that tells whether a stacked result has the dtypes of a member's result.

        Dtypes may differ only under autocast, and where operands have several float dtypes: a member's number has a
        dimension once stacked, and then decides the dtype of the result.
        """
        expected: list[torch.dtype] | None = None

        def keeps(result: Any, found: Sequence[Any], given: dict[str, Any]) -> bool:
            nonlocal expected
            if expected is None:
                may_differ = (
                    self._precision != "float32"
                    or len({d for d in dtypes_of((found, given)) if d.is_floating_point}) > 1
                )
                expected = member_dtypes(target, found, given, are_stacked) if may_differ else []
            return not expected or dtypes_of(result) == expected

        return keeps

    def _rule_of(self, node: fx.Node) -> Callable[..., Any] | None:
        target: Any = node.target
        if target in RECURRENT and node.name in self._slots:
            return partial(RECURRENT[target], slot=node.name)
        rule = _ALL_RULES.get(target)
        # The rule leaves out the operator's other results.
        if rule is embedding_bag and not _takes_first_only(node):
            return None
        return partial(elementwise, target) if rule is None and is_elementwise(target) else rule

    def _apart(self, target: Any, arguments: Any, keywords: dict[str, Any], *, draws: bool) -> _Run:
        are_stacked = self._stacked_leaves(arguments, keywords)
        return lambda count, found, given: apart(target, found, given, are_stacked, count, draws=draws)

    def _stacked_leaves(self, arguments: Any, keywords: dict[str, Any]) -> list[bool]:
        leaves = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, fx.Node)]
        return [leaf in self._stacked for leaf in leaves]

    def _check_dense(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse nodes with sparse gradients."""
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return
        if any(argument.name == "sparse" and value for argument, value in named(target, arguments, keywords)):
            raise UnfusableError(f"{_told(node)} has sparse gradients, which have no stacked form")

    def _check_memory(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse a node that writes members' values into a shared tensor, or finds values by strides."""
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return
        if target._schema.name in _BY_STRIDES:  # noqa: SLF001
            raise UnfusableError(
                f"{_told(node)} finds values by strides, and stacked trials may lie otherwise in memory"
            )
        for argument, value in named(target, arguments, keywords):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and not self._is_stacked(value):
                raise UnfusableError(f"{_told(node)} overwrites a tensor that does not depend on the trial")

    def _is_stacked(self, value: Any) -> bool:
        return any(leaf in self._stacked for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))

    def _with_last_uses(self) -> list[_StackedCall]:
        last_positions: dict[fx.Node, int] = {}
        for position, (node, _, arguments, keywords) in enumerate(self._planned):
            last_positions[node] = position
            for leaf in pytree.tree_leaves((arguments, keywords)):
                if isinstance(leaf, fx.Node):
                    last_positions[leaf] = position
        outputs = set(self._outputs)
        ends: dict[int, list[fx.Node]] = {}
        for node, position in last_positions.items():
            if node not in outputs:
                ends.setdefault(position, []).append(node)
        return [
            _StackedCall(
                node,
                run,
                tuple(arguments),
                keywords,
                tuple(ends.get(position, ())),
                names_a_device((arguments, keywords)),
            )
            for position, (node, run, arguments, keywords) in enumerate(self._planned)
        ]


def _masks(slot: str, strides: Sequence[int], is_dropout: bool, is_stacked: bool) -> _Run:
    def run(count: int, found: Sequence[Any], _keywords: dict[str, Any]) -> Tensor:
        return masks(slot, found[0] if is_stacked else _expanded(found[0], count), strides, is_dropout=is_dropout)

    return run


def _counting(loss: MaskedReduction, stacked: Sequence[bool], precision: Precision) -> _Run:
    def run(count: int, found: Sequence[Any], _keywords: dict[str, Any]) -> Tensor:
        counts, *tensors = found
        # The loss decides what is cast, not the operators of which its counted form is made.
        cast_tensors, _, region = prepared(loss.target, tensors, loss.keywords, stacked[1:], precision)
        arguments = zip([counts, *cast_tensors], stacked, strict=True)
        with region:
            return loss(*(t if is_stacked else _expanded(t, count) for t, is_stacked in arguments))

    return run


def _in_precision(run: _Run, target: Any, are_stacked: Sequence[bool], precision: Precision) -> _Run:

    def run_cast(count: int, found: Sequence[Any], keywords: dict[str, Any]) -> Any:
        arguments, named_arguments, region = prepared(target, found, keywords, are_stacked, precision)
        with region:
            return run(count, arguments, named_arguments)

    return run_cast


def _once(target: Any, *, expands: bool) -> _Run:

    def run(count: int, found: Sequence[Any], keywords: dict[str, Any]) -> Any:
        result = target(*found, **keywords)
        return _expanded(result, count).clone() if expands else result

    return run


def _under(run: _Run, *, enabled: bool | None) -> _Run:
    if enabled is None:
        return run

    def in_region(count: int, found: Sequence[Any], keywords: dict[str, Any]) -> Any:
        with torch.set_grad_enabled(enabled):
            return run(count, found, keywords)

    return in_region


def _takes_first_only(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)


def _drawing(target: Any, is_stacked: Sequence[bool], strides: Sequence[int] | None, *, is_dropout: bool) -> _Run:
    return lambda count, found, keywords: drawn(
        target, tuple(found), keywords, is_stacked, count, strides, is_dropout=is_dropout
    )


def _mapped(target: Any, found: Sequence[Any], keywords: dict[str, Any], stacked: Sequence[bool]) -> Any:
    leaves, spec = pytree.tree_flatten((tuple(found), keywords))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Any:
        # `torch.vmap` maps positional tensors only, so all other leaves are filled in here.
        filled_leaves = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled_leaves[place] = tensor
        arguments, named_arguments = pytree.tree_unflatten(filled_leaves, spec)
        return target(*arguments, **named_arguments)

    dimensions = tuple(0 if is_stacked else None for is_stacked in stacked)
    return torch.vmap(run, in_dims=dimensions)(*(leaves[place] for place in places))


def _is_made_to_be_overwritten(node: fx.Node) -> bool:
    """Return whether a node creates a fresh tensor that a later node fills in place."""
    return not node.all_input_nodes and any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable  # noqa: SLF001
        for user in node.users
    )


def _expanded(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape)


def _told(node: fx.Node) -> str:
    return str(node.target)
