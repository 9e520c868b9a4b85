"""The table of tools/house.py: each figure of a small package, counted by hand."""

import pytest

from tools.house import counted, is_one_word

FILE = '''"""What it is."""

# a comment
x = 1  # not a comment line


class Trial:
    """A `that`, and one more."""

    def run(self):
        """Go."""
        return 2


class Trial:
    pass
'''


def test_a_file(tmp_path):
    (tmp_path / "module.py").write_text(FILE)
    count = counted(tmp_path)
    assert (count.files, count.lines, count.code_lines, count.comment_lines) == (1, 16, 6, 1)
    assert (count.words, count.pronouns, count.openings) == (8, 3, 1)
    assert count.statements == 6
    assert dict(count.rows())["class names used more than once"] == "1"
    assert dict(count.rows())["class names of one word"] == "100.0% (2 of 2)"


@pytest.mark.parametrize(
    ("name", "is_one"), [("Trial", True), ("_Trial", True), ("FusedTrial", False), ("LRTF", True), ("LRTFPaper", False)]
)
def test_one_word(name, is_one):
    assert is_one_word(name) is is_one
