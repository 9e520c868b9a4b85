"""Pages of the site, their words, and their blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = ("start", "howto", "explanation", "reference", "results", "contributing")
_FENCE = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")


def pages(*sections: str) -> list[Path]:
    """Pages of some sections, in alphabetical order."""
    return [page for section in sections for page in sorted((DOCS / section).glob("*.md"))]


def words_of(page: Path) -> int:
    """Words that a reader of the page reads: no code, no comments, no addresses of links."""
    text = re.sub(r"^(```|:::).*?^\1$|<!--.*?-->|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


@dataclass(frozen=True, kw_only=True)
class PageCode:
    """Code of a page, as a reader would use the page.

    Attributes:
        files: files by name: blocks of Python or YAML whose first line is a comment with the name.
        program: all other blocks of Python, one after the other.
        commands: lines of blocks of the console that begin with a prompt.
    """

    files: dict[str, str]
    program: str
    commands: str

    @classmethod
    def of(cls, page: Path) -> "PageCode":
        """Read the code of a page."""
        files, program, commands = {}, [], []
        for language, code in _FENCE.findall(page.read_text()):
            named = _NAMED.match(code)
            if language in ("python", "yaml") and named:
                files[named[1]] = code
            elif language == "python":
                program.append(code)
            elif language == "console":
                lines = re.findall(r"^\$ ((?:.*\\\n)*.*)$", code, re.MULTILINE)
                commands += lines
        return cls(files=files, program="\n".join(program), commands="\n".join(commands))
