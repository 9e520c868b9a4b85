"""Reads YAML into plain data with the position of each value.

The reader takes one document of maps, lists and scalars, and nothing else: no object tags, no duplicate keys, no
recursion. The module must not know the meaning of a sweep file. `reader.py` reads the whole file, and `overrides.py` each
value of `--set`, before pydantic validates the data. A file of a stranger must neither run code nor take unbounded time or
memory here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys of maps and indices of lists on the way from the top to a value."""

_MAX_VALUES = 100_000  # aliases of aliases grow exponentially
_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "timestamp")}


@dataclass(frozen=True, slots=True, order=True)
class YamlPosition:
    """A place in a text; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True, order=True)
class YamlProblem:
    """One problem of a file, with its place."""

    mark: YamlPosition
    text: str


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """Plain data with the position of every value and key.

    Args:
        data: dicts with text keys, lists, scalars.
        values: start of each value.
        keys: start of the key of each value in a map.
    """

    data: Any
    values: Mapping[Path, YamlPosition]
    keys: Mapping[Path, YamlPosition]
    problems: tuple[YamlProblem, ...]

    def mark(self, path: Path) -> YamlPosition:
        """Place that a reader looks for at `path`: its key, else its value, else the nearest existing thing around."""
        for length in range(len(path), -1, -1):
            for marks in (self.keys, self.values):
                if path[:length] in marks:
                    return marks[path[:length]]
        return YamlPosition(1, 1)

    def value_mark(self, path: Path) -> YamlPosition:
        """Start of the value at `path`, or `mark` without a value."""
        return self.values.get(path) or self.mark(path)


class _YamlLoader(yaml.SafeLoader):
    """SafeLoader that reads `1e-6` as a number, as JSON, Python and YAML 1.2 do; YAML 1.1 requires `1.0e-6`."""


_YamlLoader.add_implicit_resolver(
    # PyYAML tries a resolver only on texts that begin with one of the given characters.
    _FLOAT_TAG,
    re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document: data with positions and problems. After a syntax error `data` is None."""
    loader = None
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        builder = _YamlDocumentBuilder(loader)
        data = builder.build(node, ()) if node is not None else None
    except yaml.MarkedYAMLError as error:
        return _broken(_of(error.problem_mark or error.context_mark), _syntax(error))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = YamlPosition(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return _broken(mark, f"character {chr(int(error.character))!r} is not allowed in YAML")
    except RecursionError:
        return _broken(YamlPosition(1, 1), "nested too deeply")
    finally:
        if loader is not None:
            # Clears the parser's references to its own methods, a cycle that would keep the text until a collection.
            loader.dispose()
    return YamlDocument(data, builder.values, builder.keys, tuple(builder.problems))


def _key_of(pair: tuple[yaml.Node, yaml.Node]) -> object:
    """Return the identity of a pair's key: its text, or the key itself where it is no text."""
    return pair[0].value if isinstance(pair[0], yaml.ScalarNode) else pair[0]


def _broken(mark: YamlPosition, text: str) -> YamlDocument:
    return YamlDocument(None, {}, {}, (YamlProblem(mark, text),))


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "not YAML"
    return f"{error.context}, {problem}" if problem.startswith("but ") else problem


def _of(mark: Any) -> YamlPosition:
    return YamlPosition(mark.line + 1, mark.column + 1) if mark is not None else YamlPosition(1, 1)


@dataclass
class _YamlDocumentBuilder:
    """Builds data from nodes and notes their places; `open` holds the nodes being built, to detect self-containment."""

    loader: _YamlLoader
    values: dict[Path, YamlPosition] = field(default_factory=dict)
    keys: dict[Path, YamlPosition] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    merged: set[int] = field(default_factory=set)
    num_merged: int = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        """Return a node's data as plain values, and note the position of each value and key.

        A value that contains itself becomes None and is noted as a problem.

        Raises:
            MarkedYAMLError: aliases multiply to more than `_MAX_VALUES` values.
        """
        # A value in a map is noted already, in `_pairs`.
        self.values.setdefault(path, _of(node.start_mark))
        # Counted while building, because a few lines of nested aliases stand for billions of values.
        self._check_number(len(self.values), node)
        if id(node) in self.open:
            self._refuse(node, "a value cannot contain itself")
            return None
        self.open.add(id(node))
        try:
            return self._content(node, path)
        finally:
            self.open.discard(id(node))

    def _check_number(self, num_values: int, node: yaml.Node) -> None:
        if num_values > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many values; aliases multiply?", problem_mark=node.start_mark)

    def _content(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            return self._scalar(node)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        self._refuse(node, f"the tag {tag} is not allowed; only maps, lists, text, numbers, true/false and null")
        return None

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self.loader.construct_object(node)
        # `!!int x` raises ValueError, `!!int ''` IndexError, `!!bool x` KeyError, and `!!timestamp x` AttributeError.
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            self._refuse(node, f"{node.value!r} is not a valid {node.tag.rpartition(':')[2]}")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self._merge(node)
        return dict(self._pairs(node, path))

    def _merge(self, node: yaml.MappingNode) -> None:
        """Replace `<<` of a map by the pairs of the maps there: own pairs count first, then those of earlier maps.

        PyYAML's `flatten_mapping` has no limit up to 6.0.3, and may prefer pairs of later maps in 6.0.4.

        Raises:
            MarkedYAMLError: a value of `<<` is no map, or merges multiply to more than `_MAX_VALUES` pairs in the document.
        """
        if id(node) in self.merged:  # an alias comes here again
            return
        self.merged.add(id(node))
        self._refuse_duplicates(node)
        sources: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _MERGE_TAG:
                sources += value.value if isinstance(value, yaml.SequenceNode) else [value]
        node.value = own = [pair for pair in node.value if pair[0].tag != _MERGE_TAG]
        pairs: dict[object, tuple[yaml.Node, yaml.Node]] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                tag = source.tag.replace("tag:yaml.org,2002:", "!!")
                raise yaml.MarkedYAMLError(
                    problem=f"'<<' takes a map or a list of maps, not {tag}", problem_mark=source.start_mark
                )
            self._merge(source)
            self.num_merged += len(source.value)
            self._check_number(self.num_merged, source)
            for pair in source.value:
                pairs.setdefault(_key_of(pair), pair)
        pairs.update((_key_of(pair), pair) for pair in own)
        node.value = list(pairs.values())

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        first_positions: dict[str, YamlPosition] = {}
        for key, _ in node.value:
            if key.tag == _MERGE_TAG or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first_positions:
                self._refuse(key, f"{key.value!r} is given twice, first on line {first_positions[key.value].line}")
            first_positions.setdefault(key.value, _of(key.start_mark))

    def _pairs(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            name = self._scalar(key) if isinstance(key, yaml.ScalarNode) and key.tag in _SCALAR_TAGS else None
            if not isinstance(name, str):
                key_text = repr(key.value) if isinstance(key, yaml.ScalarNode) else "this"
                self._refuse(key, f"{key_text} cannot be a key; keys are text (put it in quotes if you mean text)")
                continue
            self.keys[(*path, name)] = _of(key.start_mark)
            self.values[(*path, name)] = _of(value.start_mark)
            yield name, self.build(value, (*path, name))

    def _refuse(self, node: yaml.Node, text: str) -> None:
        problem = YamlProblem(_of(node.start_mark), text)
        if problem not in self.problems:
            self.problems.append(problem)
