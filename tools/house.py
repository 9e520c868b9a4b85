"""Counts how the package reads: `python tools/house.py [FOLDER ...]` prints one table.

The words that count as pronouns and relative words are in `house_words.txt`. A function's length leaves out its docstring, and
a comment line holds nothing but a comment.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_FILES = 15
MOST_LINES = 600
MOST_FUNCTION_LINES = 60
WORDS = frozenset((Path(__file__).parent / "house_words.txt").read_text().split())
_OPENING = re.compile(r"(What|Whose|Who)\b")
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SILENT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Count:
    """Sums over all files of some folders; `classes` has how often each class name is defined."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    statements: int = 0
    words: int = 0
    pronouns: int = 0
    openings: int = 0
    long_files: int = 0
    long_functions: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    folders: Counter[Path] = field(default_factory=Counter)

    def add(self, path: Path) -> None:
        """Count one more file."""
        text = path.read_text()
        tree = ast.parse(text)
        self.files += 1
        self.folders[path.parent] += 1
        num_lines = text.count("\n")
        self.lines += num_lines
        self.long_files += num_lines > MOST_LINES
        self._add_tree(tree)
        docstring_lines = {line for node in docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        code, comments = line_kinds(text)
        self.code_lines += len(code - docstring_lines)
        self.comment_lines += len(comments - code)

    def _add_tree(self, tree: ast.Module) -> None:
        self.statements += sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(list(docstrings(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.long_functions += function_lines(node) > MOST_FUNCTION_LINES
            if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
                words = [word.lower() for word in re.findall(r"[A-Za-z']+", re.sub(r"`[^`]*`", " ", text))]
                self.words += len(words)
                self.pronouns += sum(word in WORDS for word in words)
                self.openings += _OPENING.match(text) is not None

    def rows(self) -> Iterator[tuple[str, str]]:
        """The table's rows: a label and a figure."""
        short = sum(count for name, count in self.classes.items() if is_one_word(name))
        all_classes = self.classes.total()
        yield "files, lines", f"{self.files:,}, {self.lines:,}"
        yield "class names of one word", f"{share(short, all_classes)} ({short} of {all_classes})"
        yield "class names used more than once", f"{sum(count > 1 for count in self.classes.values())}"
        yield "pronouns and relative words in docstrings", f"{share(self.pronouns, self.words)} of {self.words:,} words"
        yield "docstrings that open with What, Whose or Who", f"{self.openings}"
        yield "comment lines per code line", f"{share(self.comment_lines, self.code_lines)} of {self.code_lines:,}"
        yield f"folders with more than {MOST_FILES} files", f"{sum(n > MOST_FILES for n in self.folders.values())}"
        yield "statements without docstrings", f"{self.statements:,}"
        yield f"files above {MOST_LINES} lines", f"{self.long_files}"
        yield f"functions above {MOST_FUNCTION_LINES} lines", f"{self.long_functions}"


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """The statements that are docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            yield statement


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and docstring."""
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        num_lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return num_lines


def line_kinds(text: str) -> tuple[set[int], set[int]]:
    """The numbers of the lines that hold code, and of those that hold a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments


def is_one_word(name: str) -> bool:
    """Whether a class name consists of one word: `Trial` and `_Trial` do, `FusedTrial` does not."""
    return len(_NAME_WORD.findall(name.lstrip("_"))) == 1


def share(part: int, whole: int) -> str:
    """A percentage."""
    return f"{100 * part / max(1, whole):.1f}%"


def counted(folder: Path) -> Count:
    """The count of all Python files below a folder."""
    count = Count()
    for path in sorted(folder.rglob("*.py")):
        count.add(path)
    return count


def main() -> None:
    """Print the table, with a column for each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("hydra_tune"), Path("integrations")])
    folders = parser.parse_args().folders
    columns = [dict(counted(folder).rows()) for folder in folders]
    print("| | " + " | ".join(str(folder) for folder in folders) + " |")
    print("|---" * (len(folders) + 1) + "|")
    for label in columns[0]:
        print(f"| {label} | " + " | ".join(column[label] for column in columns) + " |")


if __name__ == "__main__":
    main()
