"""Operators in pieces, for `split_operators`: which modules, cut where, what is refused; and the whole model again at the end.

Like `train/pieces.py` this is shared by the plain loop and the pool, so that both train the same pieces. A model is built
and its parameter groups are made while it is whole, so it draws the same numbers and has its own names for them; then the
pieces take the places of the whole parameters, in the modules and in the groups.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import TaskError
from hydra_tune.quantities import parse_bytes
from hydra_tune.shard.elementwise import check_elementwise, whole_state
from hydra_tune.shard.operator_tree import Operator, OperatorTree
from hydra_tune.shard.split_modules import ColumnSplitEmbedding, Cut, RowSplitEmbedding, SplitLinear, piece_name


@dataclass(slots=True, kw_only=True)
class _Piecewise:
    """A module in pieces.

    Attributes:
        module: it.
        kind: its class while it was whole.
        parameters: its registry of parameters while it was whole.
    """

    module: Operator
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]


@dataclass(slots=True, kw_only=True)
class _Parameter:
    """A parameter in pieces.

    Attributes:
        name: in the model.
        whole: the parameter that the model had and will have again.
        cut: where it is cut.
        stride: of the whole.
        pieces: what is trained.
    """

    name: str
    whole: nn.Parameter
    cut: Cut
    stride: tuple[int, ...]
    pieces: list[nn.Parameter] = field(default_factory=list)

    def take_apart(self) -> None:
        """Make the pieces, and leave in the whole what no one could mistake for it."""
        whole = self.whole
        parts = torch.split(whole.detach(), list(self.cut.sizes), self.cut.dim)
        self.pieces = [nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in parts]
        for piece in self.pieces:
            piece.requires_grad_(whole.requires_grad)
        # Code that has kept the parameter for itself gets a loss that is NaN, and not one that leaves the weights out.
        whole.data = torch.full((1,), torch.nan, dtype=whole.dtype).expand(whole.shape)

    def put_together(self) -> None:
        """Give the whole parameter what its pieces have."""
        whole = torch.empty_strided(self.whole.shape, self.stride, dtype=self.whole.dtype)
        for part, piece in zip(torch.split(whole, list(self.cut.sizes), self.cut.dim), self.pieces, strict=True):
            part.copy_(piece.detach())
        self.whole.data = whole


class SplitOperators:
    """The operators of one model that are in pieces.

    Args:
        modules: which, and what they were.
        parameters: theirs, each once.
    """

    def __init__(self, modules: Sequence[_Piecewise] = (), parameters: Sequence[_Parameter] = ()) -> None:
        self._modules = modules
        self._parameters = parameters
        self._by_whole = {id(p.whole): p for p in parameters}

    def in_groups(self, groups: Any) -> Any:
        """What an optimizer is given, with the pieces in the places of the whole parameters."""
        if isinstance(groups, Mapping):
            return {key: self.in_groups(value) for key, value in groups.items()}
        if type(groups) in (list, tuple):
            placed = [found for item in groups for found in self._expanded(item)]
            # Options such as betas stay the tuples they are.
            return groups if len(placed) == len(groups) and all(map(operator.is_, placed, groups)) else placed
        found = self._known(groups)
        return groups if found is None else list(found.pieces)

    def _expanded(self, item: Any) -> Iterator[Any]:
        named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)  # noqa: PLR2004 - name and parameter
        found = self._known(item[1] if named else item)
        if found is None:
            yield item if named else self.in_groups(item)
        elif named:
            yield from ((piece_name(item[0], index), piece) for index, piece in enumerate(found.pieces))
        else:
            yield from found.pieces

    def _known(self, value: object) -> _Parameter | None:
        return self._by_whole.get(id(value)) if isinstance(value, nn.Parameter) else None

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would train the pieces otherwise than the whole; the model is whole again then.

        Raises:
            TaskError: it holds a whole parameter, or parts its pieces, or does not update each element by itself.
        """
        try:
            check_elementwise(optimizer, list(self._members(optimizer)))
        except TaskError:
            self.restore(optimizer)
            raise

    def _members(self, optimizer: Optimizer) -> Iterator[tuple[str, int, int, Tensor]]:
        """What is trained in pieces: name, parameter group, dimension, and a piece."""
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for parameter in self._parameters:
            if id(parameter.whole) in group_of:
                raise TaskError(
                    f"the optimizer holds the whole {parameter.name!r}, which split_operators has cut; let optimizer= build "
                    "it from what it is given, and param_groups= return lists, or dicts with a list under 'params'"
                )
            first, *others = (group_of.get(id(piece)) for piece in parameter.pieces)
            if any(other != first for other in others):
                raise TaskError(
                    f"the optimizer puts the pieces of {parameter.name!r} into different groups; let param_groups= make the "
                    "groups"
                )
            if first is not None and parameter.whole.requires_grad:
                yield parameter.name, first, parameter.cut.dim, parameter.pieces[0]

    def restore(self, optimizer: Optimizer) -> None:
        """Make the model whole again, and the optimizer one of the whole parameters, as if nothing had been cut."""
        first: dict[int, nn.Parameter] = {}
        rest: set[int] = set()
        for parameter in self._parameters:
            parameter.put_together()
            states = [optimizer.state.pop(piece, {}) for piece in parameter.pieces]
            if any(states):
                optimizer.state[parameter.whole] = whole_state(states, parameter.cut)
            first[id(parameter.pieces[0])] = parameter.whole
            rest.update(map(id, parameter.pieces[1:]))
        for group in optimizer.param_groups:
            _put_back(group, first, rest)
        for found in self._modules:
            found.module.__class__ = found.kind  # type: ignore[assignment]
            for name in ("split_path", "split_sizes"):
                delattr(found.module, name)
            found.module._parameters.clear()  # noqa: SLF001 - the registry is what is put back
            found.module._parameters.update(found.parameters)  # noqa: SLF001


def _listed(groups: Any) -> Any:
    """Parameter groups with lists in place of iterators, which would run over the model once it is cut."""
    if isinstance(groups, Iterator):
        return [_listed(item) for item in groups]
    if isinstance(groups, Mapping):
        return {key: _listed(value) for key, value in groups.items()}
    return [_listed(item) for item in groups] if type(groups) is list else groups


def split_operators(
    model: nn.Module, groups: Any, wanted: Mapping[str, int] | str | None
) -> tuple[SplitOperators, Any]:
    """Cut operators of a model that has just been built.

    Args:
        model: the model; its modules stay the same objects.
        groups: what its optimizer would be given.
        wanted: as in `TrainTask`.

    Returns:
        What has been cut, and what the optimizer is to be given.

    Raises:
        TaskError: a module that is not there, or cannot be cut without changing what it computes; by name.
    """
    if not wanted:
        return SplitOperators(), groups
    groups = _listed(groups)
    tree = OperatorTree(model)
    if isinstance(wanted, Mapping):
        chosen = {tree.named(path): count for path, count in wanted.items()}
    else:
        chosen = tree.larger_than(parse_bytes(wanted))
    tree.add_tied(chosen, may_differ=not isinstance(wanted, Mapping))
    cuts = {module: tree.cut(module, count) for module, count in chosen.items() if count > 1}
    for module in cuts:
        tree.check(module)
    parameters = {
        id(parameter): _Parameter(
            name=tree.names[id(parameter)], whole=parameter, cut=cut, stride=tuple(parameter.stride())
        )
        for module, cut in cuts.items()
        for parameter in module.parameters()
    }
    for parameter in parameters.values():
        parameter.take_apart()
    modules = [_taken_apart(module, tree.paths[module], cut, parameters) for module, cut in cuts.items()]
    operators = SplitOperators(modules, list(parameters.values()))
    return operators, operators.in_groups(groups)


def _taken_apart(module: Operator, path: str, cut: Cut, parameters: Mapping[int, _Parameter]) -> _Piecewise:
    """Let a module have the pieces."""
    registry = module._parameters  # noqa: SLF001 - a class in pieces would not register what is whole
    found = _Piecewise(module=module, kind=type(module), parameters=dict(registry))
    registry.clear()
    for name, whole in found.parameters.items():
        pieces = [] if whole is None else parameters[id(whole)].pieces
        registry.update({piece_name(name, index): piece for index, piece in enumerate(pieces)})
    if isinstance(module, nn.Linear):
        module.__class__ = SplitLinear
    else:
        module.__class__ = ColumnSplitEmbedding if cut.dim else RowSplitEmbedding
    vars(module).update(split_path=path, split_sizes=cut.sizes)
    return found


def _put_back(group: dict[str, Any], first: Mapping[int, nn.Parameter], rest: set[int]) -> None:
    """Whole parameters in a group, where their first pieces are."""
    params = group["params"]
    kept = [index for index, parameter in enumerate(params) if id(parameter) not in rest]
    if "param_names" in group:
        names = group["param_names"]
        group["param_names"] = [
            names[index].removesuffix(piece_name("", 0)) if id(params[index]) in first else names[index]
            for index in kept
        ]
    group["params"] = [first.get(id(params[index]), params[index]) for index in kept]
