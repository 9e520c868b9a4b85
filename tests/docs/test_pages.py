"""Pages of the site: all are in the contents, none is too long, and their links lead somewhere."""

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT, SECTIONS, pages, words_of

ALL = pages(*SECTIONS)


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_short(page):
    assert words_of(page) <= 1500


def test_the_guides_are_short():
    assert sum(words_of(page) for page in pages("start", "howto", "explanation")) <= 20_000


def test_the_reference_is_short():
    assert sum(words_of(page) for page in pages("reference")) <= 8_000


def test_every_page_is_in_the_contents():
    contents = re.findall(r"^([a-z-]+/[a-z-]+|renames)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(contents) == sorted([*(str(page.relative_to(DOCS).with_suffix("")) for page in ALL), "renames"])


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_sentence_opens_with_a_relative_word(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"(?:^|[.:] )(?:What|Whose|Who) [a-z]+ [^?]*?[.:]", text) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *ALL], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """Sphinx checks those within the site; those that leave the site are checked here."""
    for target in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def texts_of(path):
    """The texts of a program without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_messages_name_pages_by_titles_because_users_have_no_files_of_pages():
    sources = [path for folder in ("hydra_tune", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [text for path in sources for text in texts_of(path)]
    texts.append((ROOT / "hydra_tune" / "cli" / "starter" / "space.yaml").read_text())
    named = {title for text in texts for title in re.findall(r"page '([^']+)' of the documentation", text)}
    assert len(named) >= 4
    assert named <= {page.read_text().partition("\n")[0].removeprefix("# ") for page in ALL}
    assert [text for text in texts if re.search(r"docs/[a-z]+/[a-z-]+\.md", text)] == []
