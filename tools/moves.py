"""Moves modules into sub-packages and renames names: `python tools/moves.py MAP ... [--commit]`.

A MAP is a file of `tools/moves/`, written against the tree as it is when the map's turn comes, and mentions no line number.
The script moves files with git, writes the new packages' docstrings, rewrites imports, texts that name modules and paths that
name files, and then compares the syntax tree of each file with the tree before: nothing but what the map says may differ.
A map holds

* `subject`, of the commit;
* `[[package]]` tables: the `folder`, its `doc`, the folder that its files come `from`, and `files`, old names to new ones;
* `[tests]`, old paths to new ones, of tests that mirror no module (`test_x.py` follows module `x` by itself);
* `[names]`, as `"package.module:Name" = "NewName"`, by the module's old path;
* `[pages]`: the folder whose files a page of `docs/` names without their folder;
* `[[create]]`, `[[insert]]` and `[[replace]]`: a file's `text`, a text `after` or `before` the line that begins so, a `new`
  text in the place of an `old` one.
"""

import argparse
import ast
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

MAPS = Path(__file__).parent / "moves"
SEARCHED = (
    "hydra_tune",
    "integrations",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "README.md",
    "pyproject.toml",
    ".ci",
    "Makefile",
)
TEXTS = {".py", ".pyi", ".md", ".toml", ".yaml", ".ipynb", ""}
MIRRORS = {"hydra_tune": "tests/unit", "integrations/hydra_tune_ray": "tests/unit/ray"}
ROOTS = ("integrations/", "hydra_tune/")
WIDTH, MOST = 120, 128
DONE = "\0"  # in a name that is the new one already, though it may be some other module's old one
_FILE = re.compile(r"(?<![\w./-])\.?[A-Za-z_][\w-]*(?:/[\w-]+)*\.pyi?(?!\w)")
_DOTTED = re.compile(r"(?<![\w./-])(?:hydra_tune|hydra_tune_ray|hydra_tune_optuna|tests)(?:\.\w+)+(?![\w-])")
_PARENTS = re.compile(r"(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)(\])")


class MoveError(Exception):
    """The map does not fit the tree, or something else than the map says has changed."""


def is_searched(path: str) -> bool:
    """Whether a file may name modules; the tests of this script name some that are made up."""
    known = path.startswith(SEARCHED) and PurePosixPath(path).suffix in TEXTS
    return known and not path.startswith("tests/unit/tools/")


def dotted(path: str) -> str:
    """The name by which a file is imported."""
    return path.removeprefix("integrations/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def moved_names(table: dict[str, str]) -> re.Pattern[str]:
    """Finds any of the old names, as a whole."""
    names = "|".join(sorted(map(re.escape, table), key=len, reverse=True))
    return re.compile(rf"(?<![\w./-])({names})(?![\w-])" if names else r"(?!)")


@dataclass
class Plan:
    """What one map does to a tree of files."""

    subject: str
    files: dict[str, str]
    docs: dict[str, str]
    names: dict[tuple[str, str], str]
    edits: list[tuple[str, dict[str, str]]]
    pages: dict[str, str]
    notes: list[str]
    tracked: list[str]
    dotted: dict[str, str] = field(init=False)
    folders: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Derive names from paths."""
        self.dotted = {dotted(old): dotted(new) for old, new in self.files.items() if old.endswith(".py")}
        self.folders = {
            str(PurePosixPath(old).parent): str(PurePosixPath(new).parent)
            for old, new in self.files.items()
            if old.endswith("/__init__.py")
        }
        for pair in list(self.folders.items()):
            mirrored = tuple(each.replace("hydra_tune/", "tests/unit/", 1) for each in pair)
            self.folders[mirrored[0]] = mirrored[1]
        short = {old.removeprefix("hydra_tune/"): new.removeprefix("hydra_tune/") for old, new in self.folders.items()}
        self._folder_names = {**self.folders, **{old: new for old, new in short.items() if "/" in old}}
        self._folders = re.compile(
            moved_names(self._folder_names).pattern.replace(r"(?![\w-])", r"(?=/(?:[\s`\"',.)]|$)|[\"'])")
        )
        stems = Counter(PurePosixPath(path).name for path in self.tracked if path.startswith(ROOTS))
        self._unique = {
            PurePosixPath(old).name: new for old, new in self.files.items() if stems[PurePosixPath(old).name] == 1
        }

    def text(self, text: str, path: str) -> str:
        """A text of a file, with all names of modules and files as they will be.

        Args:
            text: as it is.
            path: of the file, as it is.
        """
        text = _DOTTED.sub(lambda match: self._name(match[0]), text)
        text = _FILE.sub(lambda match: self._file(match[0], path), text)
        return self._folders.sub(lambda match: self._folder_names[match[1]], text)

    def _name(self, name: str) -> str:
        known, rest = name, ""
        while known and known not in self.dotted:
            known, _, last = known.rpartition(".")
            rest = f".{last}{rest}"
        return f"{self.dotted[known]}{rest}" if known else name

    def _file(self, name: str, path: str) -> str:
        if "/" not in name:
            return self._bare(name, path)
        for prefix in ("", *ROOTS):
            if prefix + name in self.files:
                return self.files[prefix + name].removeprefix(prefix)
        ends = [old for old in self.files if old.startswith(ROOTS) and old.endswith(f"/{name}")]
        return _short(self.files[ends[0]]) if len(ends) == 1 else name

    def _bare(self, name: str, path: str) -> str:
        """A file's name without its folder: one beside the file that names it, or the only one of that name."""
        folder = PurePosixPath(self.pages.get(path, path)).parent
        beside = str(folder / name)
        target = PurePosixPath(self.files.get(beside, beside))
        now = PurePosixPath(self.files.get(path, path)).parent
        if beside == path or (target.parent == now and beside in self.files):
            return target.name
        if path in self.pages and beside in self.files:
            base = self.folders.get(str(folder), str(folder))
            return str(target.relative_to(base)) if target.is_relative_to(base) else _short(str(target))
        if path.startswith(ROOTS) and (beside in self.files or (now != folder and beside in self.tracked)):
            return _short(str(target))
        if name in self._unique and path.endswith(".md"):
            return _short(self._unique[name])
        return PurePosixPath(self._unique[name]).name if name in self._unique and path.startswith("tests/") else name


def _short(path: str) -> str:
    """A path as docstrings and pages name it."""
    return path.removeprefix(ROOTS[0]).removeprefix(ROOTS[1])


def read_plan(name: str, root: Path) -> Plan:
    """A map, as what it does to the tree of `root`; what it names and is not there, is left out with a note.

    Raises:
        MoveError: two files would be at one place.
    """
    data = tomllib.loads((MAPS / f"{name}.toml").read_text())
    tracked = run(["git", "ls-files", "-z"], root).rstrip("\0").split("\0")
    files: dict[str, str] = {}
    docs: dict[str, str] = {}
    for package in data.get("package", []):
        if "doc" in package:
            docs[f"{package['folder']}/__init__.py"] = package["doc"].strip("\n")
        for old, new in package.get("files", {}).items():
            files[f"{package['from']}/{old}.py"] = f"{package['folder']}/{new}.py"
    for old, new in list(files.items()):
        for package, tests in MIRRORS.items():
            if old.startswith(f"{package}/"):
                test, mirror = (_test_of(path.replace(package, tests, 1)) for path in (old, new))
                if test in tracked:
                    files[test] = mirror
    files = _with_folders(data.get("tests", {}), tracked, files)
    missing = [old for old in files if old not in tracked]
    files = {old: new for old, new in files.items() if old != new and old not in missing}
    _check_files(files, tracked)
    return Plan(
        subject=data["subject"],
        files=files,
        docs=docs,
        names={tuple(old.split(":")): new for old, new in data.get("names", {}).items()},
        edits=[(kind, each) for kind in ("create", "replace", "insert") for each in data.get(kind, [])],
        pages={page: f"{folder}/page" for page, folder in data.get("pages", {}).items()},
        tracked=tracked,
        notes=[f"{old} is not there, and left out" for old in missing],
    )


def _test_of(path: str) -> str:
    return str(PurePosixPath(path).with_name(f"test_{PurePosixPath(path).name}"))


def _with_folders(tests: dict[str, str], tracked: list[str], files: dict[str, str]) -> dict[str, str]:
    """All moves: a test's own entry goes before the module that it mirrors, and that before its folder's."""
    folders = {old: new for old, new in tests.items() if old.endswith("/")}
    whole = {
        path: new + path.removeprefix(old) for old, new in folders.items() for path in tracked if path.startswith(old)
    }
    return {**whole, **files, **{old: new for old, new in tests.items() if old not in folders}}


def _check_files(files: dict[str, str], tracked: list[str]) -> None:
    twice = [new for new, count in Counter(files.values()).items() if count > 1]
    taken = [new for new in files.values() if new in tracked and new not in files]
    if twice or taken:
        raise MoveError(f"two files for one place: {twice}; already there: {taken}")


def run(command: list[str], root: Path) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


# Edits of one file


@dataclass
class Source:
    """A Python file before any edit, with what of its names changes."""

    path: str
    source: str
    tree: ast.Module
    renamed: dict[str, str] = field(default_factory=dict)
    attributes: dict[tuple[str, str], str] = field(default_factory=dict)
    spans: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find where each line begins, in bytes."""
        self.data = self.source.encode()
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def replace(self, node: Any, text: str) -> None:
        """Replace what a node spans."""
        start = self._starts[node.lineno - 1] + node.col_offset
        self.spans.append((start, self._starts[node.end_lineno - 1] + node.end_col_offset, text))

    def replace_name(self, node: Any, old: str, text: str) -> None:
        """Replace the first or, of an attribute, the last mention of a name in what a node spans."""
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        start = self._starts[node.lineno - 1] + node.col_offset
        if isinstance(node, ast.Attribute):
            start = end - len(old.encode())
        else:
            match = re.search(rb"\b" + old.encode() + rb"\b", self.data[start:end])
            assert match is not None
            start += match.start()
        self.spans.append((start, start + len(old.encode()), text))

    def edited(self) -> str:
        """The source with all replacements."""
        data = self.data
        for start, end, text in sorted(set(self.spans), reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()

    def bound(self) -> Counter[str]:
        """How often each name is bound, by whatever binds it."""
        found: Counter[str] = Counter()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found[node.id] += 1
            elif isinstance(node, ast.arg):
                found[node.arg] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name] += 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.update((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found[node.name] += 1
        return found


def rename_imports(source: Source, plan: Plan) -> None:
    """Rewrite `from package import module`; whole dotted names are texts, and rewritten with them."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        statements: dict[str, list[str]] = {}
        for alias in node.names:
            new = plan.dotted.get(f"{node.module}.{alias.name}")
            if new is None:
                statements.setdefault(node.module, []).append(_aliased(alias.name, alias.asname))
                continue
            package, _, stem = new.rpartition(".")
            package = package.replace(".", f"{DONE}.")
            local = alias.asname
            if local is None and stem != alias.name:
                bound = source.bound()
                if bound[alias.name] > 1 or bound[stem] or _is_used(source.tree, stem):
                    local = alias.name
                else:
                    source.renamed[alias.name] = stem
            statements.setdefault(package, []).append(_aliased(stem, local))
        if list(statements) != [node.module] or statements[node.module] != [
            _aliased(a.name, a.asname) for a in node.names
        ]:
            indent = "\n" + " " * node.col_offset
            source.replace(
                node, indent.join(f"from {name} import {', '.join(what)}" for name, what in statements.items())
            )


def _aliased(name: str, local: str | None) -> str:
    return name if local is None or local == name else f"{name} as {local}"


def _is_used(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def rename_names(source: Source, names: dict[tuple[str, str], str]) -> None:
    """Find what of a file's names means a renamed class or function, here or in a module that is imported here.

    Raises:
        MoveError: a renamed name is bound here as something else, too, or the new one is taken.
    """
    module = dotted(source.path)
    modules = _modules(source.tree)
    for (home, old), new in names.items():
        if home == module:
            source.renamed[old] = new
        source.attributes |= {(local, old): new for local, name in modules.items() if name == home}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (node.module, alias.name) in names:
                    new = names[node.module, alias.name]
                    source.replace_name(alias, alias.name, new)
                    if alias.asname is None:
                        source.renamed[alias.name] = new
    bound = source.bound() if source.renamed else Counter()
    for old, new in source.renamed.items():
        if bound[new] or bound[old] > sum(1 for node in ast.walk(source.tree) if _binds(node, old)):
            raise MoveError(
                f"{source.path}: {old} cannot be called {new}, for one of the two is something else there, too"
            )


def _defines(source: Source, home: str, name: str) -> bool:
    return dotted(source.path) == home and any(_binds(node, name) for node in source.tree.body)


def _modules(tree: ast.Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def carry_out_names(source: Source) -> None:
    """Replace every use of the names that were found."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id in source.renamed:
            source.replace(node, source.renamed[node.id])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in source.renamed:
            if node in source.tree.body:
                source.replace_name(_Head(node), node.name, source.renamed[node.name])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            new = source.attributes.get((node.value.id, node.attr))
            if new is not None:
                source.replace_name(node, node.attr, new)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[0], ast.Name):
            name = node.args[1]
            if isinstance(name, ast.Constant) and (node.args[0].id, name.value) in source.attributes:
                source.replace_name(name, str(name.value), source.attributes[node.args[0].id, str(name.value)])


def carry_out_annotations(source: Source) -> None:
    """Replace the names in annotations that are texts, because what they name comes later."""
    for node in ast.walk(source.tree):
        for text in _annotation_texts(node):
            for old, new in source.renamed.items():
                if re.search(rf"\b{old}\b", text.value):
                    source.replace_name(text, old, new)


def _annotation_texts(node: ast.AST) -> Iterator[Any]:
    for name in ("annotation", "returns"):
        annotation = getattr(node, name, None)
        if annotation is not None:
            yield from (
                each for each in ast.walk(annotation) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


class _Head:
    """The statement up to its body: where a class's or a function's own name is."""

    def __init__(self, node: Any) -> None:
        self.lineno, self.col_offset = node.lineno, node.col_offset
        self.end_lineno, self.end_col_offset = node.body[0].lineno, node.body[0].col_offset


def all_names(plan: Plan, sources: list[Source]) -> dict[tuple[str, str], str]:
    """The renamed names, under every module that hands one on; a name that is nowhere defined is left out with a note."""
    names = {key: new for key, new in plan.names.items() if any(_defines(source, *key) for source in sources)}
    plan.notes += [f"{home} has no {old}, which is left out" for home, old in plan.names if (home, old) not in names]
    while True:
        before = len(names)
        for source in sources:
            for node in source.tree.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        new = names.get((node.module, alias.name))
                        if new is not None and alias.asname in {None, alias.name}:
                            names[dotted(source.path), alias.name] = new
        if len(names) == before:
            return names


def text_of_names(text: str, renamed: dict[str, str], names: dict[tuple[str, str], str]) -> str:
    """Renamed names in backticks, and in texts such as `module:Name` and `module.Name`."""
    for (home, old), new in names.items():
        text = re.sub(rf"({re.escape(home)}[:.]){old}\b", rf"\g<1>{new}", text)
    for old, new in renamed.items():
        text = re.sub(rf"(`[^`\n]*?)\b{old}\b(?=[^`\n]*`)", rf"\g<1>{new}", text) if old[:1].isupper() else text
    return text


def deeper(text: str, depth: int) -> str:
    """The text of a file that has moved so many folders down, which finds the repository's root from its own path."""
    return _PARENTS.sub(lambda match: f"{match[1]}{int(match[2]) + depth}{match[3]}", text)


def wrapped(text: str, before: str) -> str:
    """Lines of prose that have become too long go on in the next line of their paragraph."""
    known = set(before.splitlines())
    lines, at = text.split("\n"), 0
    prose = _prose_lines(text)
    while at < len(lines):
        line = lines[at]
        if len(line) > MOST and at in prose and line.lstrip().startswith(('"""', "#")):
            lines[at] = line = without_folders(line)
        if len(line) > WIDTH and at in prose and line not in known and _is_prose(line):
            cut = line.rfind(" ", 0, WIDTH)
            indent = len(line) - len(line.lstrip())
            if cut > indent:
                mark = "# " if line.lstrip().startswith("# ") else ""
                rest, below = line[cut + 1 :], lines[at + 1] if at + 1 < len(lines) else ""
                lines[at] = line[:cut]
                if _goes_on(line, below, mark):
                    lead = " " * (len(below) - len(below.lstrip())) + mark
                    lines[at + 1] = f"{lead}{rest} {below[len(lead) :]}"
                else:
                    hanging = 4 * bool(re.match(r"\s+\w[\w, ]*: ", line)) or 2 * line.lstrip().startswith(("* ", "- "))
                    lines.insert(at + 1, " " * (indent + hanging) + mark + rest)
                    prose = {number + (number > at) for number in prose} | {at + 1}
        at += 1
    return "\n".join(lines)


def without_folders(text: str) -> str:
    """A text with files by their names alone: for lines that have no room for more."""
    return re.sub(r"`(?:\w+/)+(\w+\.py)`", r"`\1`", text)


def _prose_lines(text: str) -> set[int]:
    """The numbers, from 0, of lines that belong to docstrings or hold a comment alone."""
    found = {number for number, line in enumerate(text.split("\n")) if line.lstrip().startswith("# ")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update(range(node.lineno - 1, node.end_lineno or 0))
    return found


def _is_prose(line: str) -> bool:
    """Whether a line may be broken: not where a docstring is one line, for then its summary would be two."""
    return not (line.lstrip().startswith(('"""', 'r"""')) or line.endswith('"""'))


def _goes_on(line: str, below: str, mark: str) -> bool:
    stripped = below.lstrip()
    if not stripped or stripped.startswith(('"""', "* ", "- ")) or not stripped.startswith(mark):
        return False
    indents = len(below) - len(stripped), len(line) - len(line.lstrip())
    return indents[0] > indents[1] or (indents[0] == indents[1] and not re.match(r"\s+\w[\w, ]*: ", below))


# Proof


def changes(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Where two syntax trees differ: pairs of leaves, or of what has another shape."""
    if type(old) is not type(new):
        yield old, new
    elif isinstance(old, ast.AST):
        for name in old._fields:
            yield from changes(getattr(old, name, None), getattr(new, name, None))
    elif isinstance(old, list):
        if len(old) != len(new):
            yield old, new
        else:
            for pair in zip(old, new, strict=True):
                yield from changes(*pair)
    elif old != new:
        yield old, new


def without_imports(tree: ast.Module) -> tuple[ast.Module, Counter[tuple[str, ...]]]:
    """A tree without imports, and the imports: order is the formatter's."""
    found: Counter[tuple[str, ...]] = Counter()

    class Taking(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
            found.update((str(node.module), alias.name, alias.asname or "") for alias in node.names)
            return ast.Pass() if node.col_offset else None

        def visit_Import(self, node: ast.Import) -> ast.AST | None:
            found.update((alias.name, "", alias.asname or "") for alias in node.names)
            return ast.Pass() if node.col_offset else None

        def generic_visit(self, node: ast.AST) -> ast.AST:
            super().generic_visit(node)
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1:
                node.body = [each for each in body if not isinstance(each, ast.Pass)] or body[:1]  # type: ignore[attr-defined]
            return node

    return Taking().visit(tree), found


def mapped_import(key: tuple[str, ...], plan: Plan, names: dict[tuple[str, str], str]) -> tuple[str, ...]:
    """What an import brings, once all is moved; without what it is called here."""
    module, name, _ = key
    whole = plan.dotted.get(f"{module}.{name}")
    if name and whole is not None:
        return whole.rpartition(".")[0], whole.rpartition(".")[2]
    return plan.dotted.get(module, module), names.get((module, name), name)


def comments(text: str) -> str:
    """All comments of a file, as one text: a long one may go on in another line."""
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def check(source: Source, after: str, plan: Plan, names: dict[tuple[str, str], str]) -> list[str]:
    """All that has changed in a file beside what the map says."""

    def expected(text: str) -> str:
        return flat(plan.text(text_of_names(text, source.renamed, names), source.path))

    def flat(text: str) -> str:
        return " ".join(without_folders(text).split())

    def annotation(text: str) -> str:
        return re.sub(r"\w+", lambda match: source.renamed.get(match[0], match[0]), text)

    old, imports = without_imports(ast.parse(source.source))
    new, imports_now = without_imports(ast.parse(after))
    wrong = [
        f"{was!r} -> {now!r}"
        for was, now in changes(old, new)
        if not (
            isinstance(was, str)
            and isinstance(now, str)
            and (
                annotation(was) == now
                or expected(was) == flat(now)
                or source.renamed.get(was) == now
                or now in source.attributes.values()
            )
        )
        and not (isinstance(was, int) and "parents" in after)
    ]
    wanted: Counter[tuple[str, ...]] = Counter(mapped_import(key, plan, names) for key in imports.elements())
    got: Counter[tuple[str, ...]] = Counter(key[:2] for key in imports_now.elements())
    if wanted != got:
        wrong.append(f"imports: {dict(wanted - got)} -> {dict(got - wanted)}")
    if sorted(expected(comments(source.source)).split()) != sorted(flat(comments(after)).split()):
        wrong.append("comments")
    return [f"{source.path}: {each}" for each in wrong]


# The whole


def apply(name: str, root: Path, ruff: str) -> Plan:
    """Carry out one map in the tree of `root`, and prove that nothing else has changed.

    Raises:
        MoveError: it cannot be carried out (and nothing is changed), or something else has changed.
    """
    plan = read_plan(name, root)
    texts = [path for path in plan.tracked if is_searched(path)]
    sources = [_source(path, root) for path in texts if path.endswith((".py", ".pyi"))]
    names = all_names(plan, sources)
    for source in sources:
        rename_imports(source, plan)
        rename_names(source, names)
        carry_out_names(source)
        carry_out_annotations(source)
    by_path = {source.path: source for source in sources}
    written = {}
    for path in texts:
        before = (root / path).read_text()
        edited = by_path.get(path)
        text = before if edited is None else edited.edited()
        text = plan.text(text_of_names(text, {} if edited is None else edited.renamed, names), path)
        depth = plan.files.get(path, path).count("/") - path.count("/")
        text = deeper(text.replace(DONE, ""), depth)
        if text != before:
            written[path] = wrapped(text, before) if path in by_path else text
    for path, text in written.items():
        (root / path).write_text(text)
    _move(plan, root)
    touched = sorted({plan.files.get(path, path) for path in (*written, *plan.files)} & set(_tracked(root)))
    touched += [path for path in _create(plan, root) if path not in touched]
    python = [path for path in touched if path.endswith((".py", ".pyi"))]
    subprocess.run([ruff, "check", "--quiet", "--fix", "--select", "I", *python], cwd=root, check=True)
    subprocess.run([ruff, "format", "--quiet", *python], cwd=root, check=True)
    wrong = []
    for source in sources:
        after = (root / plan.files.get(source.path, source.path)).read_text()
        if after != source.source and plan.files.get(source.path, source.path) not in plan.docs:
            wrong += check(source, after, plan, names)
    _edit(plan, root)
    run(["git", "add", "--all", *SEARCHED], root)
    if wrong:
        raise MoveError("changed beside what the map says:\n" + "\n".join(wrong))
    for line in (*plan.notes, *left_over(plan, root, set(touched))):
        print("look at:", line)
    return plan


def _source(path: str, root: Path) -> Source:
    text = (root / path).read_text()
    return Source(path=path, source=text, tree=ast.parse(text))


def _tracked(root: Path) -> list[str]:
    return run(["git", "ls-files", "-z"], root).rstrip("\0").split("\0")


def _move(plan: Plan, root: Path) -> None:
    """Move files by way of other names, so that each may take a place that another one leaves."""
    for step in ("leave", "arrive"):
        for old, new in plan.files.items():
            between = f"{old}.moving"
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            run(["git", "mv", *((old, between) if step == "leave" else (between, new))], root)
    for old in plan.files:
        folder = root / PurePosixPath(old).parent
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= {"__pycache__"}:
            run(["rm", "-r", str(folder)], root)


def _create(plan: Plan, root: Path) -> list[str]:
    """Write the packages' docstrings: a package that has more than a line of its own keeps it."""
    for path, doc in plan.docs.items():
        file = root / path
        summary, *paragraphs = doc.split("\n\n")
        paragraphs = [textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs]
        text = '"""' + "\n\n".join([summary, *paragraphs]) + '\n"""\n'
        if file.exists():
            old = file.read_text()
            statement = ast.parse(old).body[:1]
            if not statement or not isinstance(statement[0], ast.Expr) or (statement[0].end_lineno or 0) > 1:
                continue
            text += old.partition("\n")[2]
        file.write_text(text)
    return [path for path in plan.docs if (root / path).exists()]


def _edit(plan: Plan, root: Path) -> None:
    """Carry out what the map says in words of its own; what is there already is left alone."""
    for kind, edit in plan.edits:
        file = root / edit["file"]
        if kind == "create":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(edit["text"].lstrip("\n"))
            continue
        text = file.read_text()
        new = edit["new"] if kind == "replace" else edit["text"]
        if new in text:
            continue
        if kind == "replace":
            if edit["old"] not in text:
                plan.notes.append(f"{edit['file']} has no {edit['old']!r}, which is left as it is")
            file.write_text(text.replace(edit["old"], new, 1))
            continue
        anchor: str = edit["after"] if "after" in edit else edit["before"]
        lines = text.split("\n")
        at = next((number for number, line in enumerate(lines) if line.startswith(anchor)), None)
        if at is None:
            plan.notes.append(f"{edit['file']} has no line that begins with {anchor!r}: {new!r} is left out")
            continue
        lines.insert(at + ("after" in edit), new)
        file.write_text("\n".join(lines))


def left_over(plan: Plan, root: Path, touched: set[str]) -> Iterator[str]:
    """Places that a person has to look at: old names by themselves in prose, names put together at run time, long lines."""
    stems = {PurePosixPath(old).stem: old for old in plan.files if old.startswith(ROOTS)}
    new_stems = {PurePosixPath(new).stem for new in plan.files.values()}
    gone = moved_names({stem: "" for stem in stems if stem not in new_stems and stem != "__init__"})
    packages = {old.rpartition(".")[0] for old in plan.dotted if not old.startswith("tests")}
    put_together = re.compile("|".join(re.escape(package) + r"\.\{" for package in packages) or r"(?!)")
    near = tuple({"/".join(old.split("/")[:2]) + "/" for old in plan.files})
    for path in _tracked(root):
        if is_searched(path):
            for number, line in enumerate((root / path).read_text().splitlines(), 1):
                alone = path.startswith(near) and any(gone.fullmatch(each) for each in re.findall(r"`([\w/.]+)`", line))
                too_long = path in touched and path.endswith(".py") and len(line) > MOST and "noqa" not in line
                if alone or too_long or put_together.search(line):
                    yield f"{path}:{number}: {line.strip()}"


def main() -> None:
    """Carry out the maps that are named, in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maps", nargs="+")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--ruff", default=str(Path(sys.executable).with_name("ruff")))
    parser.add_argument("--commit", action="store_true", help="commit each map under its subject")
    options = parser.parse_args()
    root = options.root.resolve()
    if run(["git", "status", "--porcelain", "--untracked-files=no"], root).strip():
        sys.exit("commit or stash what has changed first")
    for name in options.maps:
        try:
            plan = apply(name, root, options.ruff)
        except MoveError as error:
            sys.exit(f"{name}: {error}")
        print(f"{name}: {len(plan.files)} files moved")
        if options.commit:
            run(["git", "commit", "--quiet", "--message", plan.subject], root)


if __name__ == "__main__":
    main()
