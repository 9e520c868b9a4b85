"""The script of tools/moves.py on a small repository: what a map moves and renames, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import moves

RUFF = str(Path(sys.executable).with_name("ruff"))
FILES = {
    "hydra_tune/__init__.py": "",
    "hydra_tune/fusion/__init__.py": '"""Groups."""\n',
    "hydra_tune/fusion/seat.py": '''"""A place; see `group.py`."""


class Seat:
    """A place of a group."""

    def beside(self, other: "Seat") -> bool:
        return isinstance(other, Seat)
''',
    "hydra_tune/fusion/group.py": '''"""Groups, of every `Seat` (`fusion/seat.py`)."""

from hydra_tune.fusion import seat
from hydra_tune.fusion.seat import Seat

SEATS = (Seat(), seat.Seat())
''',
    "tests/unit/fusion/test_seat.py": """from pathlib import Path

from hydra_tune.fusion import seat

ROOT = Path(__file__).parents[3]
NAMES = ("hydra_tune.fusion.seat:Seat.beside", "hydra_tune.fusion.seat.Seat", "hydra_tune.fusion", seat.Seat)
""",
    "docs/groups.md": "A seat is in `hydra_tune/fusion/seat.py`, a group in `fusion/group.py`.\n",
    "pyproject.toml": "[tool.ruff]\nline-length = 120\n",
}
MAP = '''
subject = "Move"

[[package]]
folder = "hydra_tune/fusion/group"
doc = """
Groups at work.

Read `slot` first.
"""
from = "hydra_tune/fusion"
[package.files]
seat = "slot"
group = "group_trial"

[names]
"hydra_tune.fusion.seat:Seat" = "Slot"
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    if not Path(RUFF).exists():
        pytest.skip("no ruff")
    for path, text in FILES.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_text(text)
    (tmp_path / "move.toml").write_text(MAP)
    monkeypatch.setattr(moves, "MAPS", tmp_path)
    monkeypatch.setattr(moves, "SEARCHED", ("hydra_tune", "tests", "docs", "pyproject.toml"))
    for command in ("init", "add ."):
        subprocess.run(["git", *command.split()], cwd=tmp_path / "tree", check=True, capture_output=True)
    return tmp_path / "tree"


def test_modules_names_and_texts(root):
    moves.apply("move", root, RUFF)
    assert not (root / "hydra_tune/fusion/seat.py").exists()
    assert (
        root / "hydra_tune/fusion/group/__init__.py"
    ).read_text() == '"""Groups at work.\n\nRead `slot` first.\n"""\n'
    slot = (root / "hydra_tune/fusion/group/slot.py").read_text()
    assert '"""A place; see `group_trial.py`."""' in slot
    assert 'def beside(self, other: "Slot") -> bool:\n        return isinstance(other, Slot)' in slot
    assert (
        (root / "hydra_tune/fusion/group/group_trial.py").read_text()
        == '''"""Groups, of every `Slot` (`fusion/group/slot.py`)."""

from hydra_tune.fusion.group import slot
from hydra_tune.fusion.group.slot import Slot

SEATS = (Slot(), slot.Slot())
'''
    )
    test = (root / "tests/unit/fusion/group/test_slot.py").read_text()
    assert "from hydra_tune.fusion.group import slot\n" in test
    assert "parents[4]" in test
    for name in ("hydra_tune.fusion.group.slot:Slot.beside", "hydra_tune.fusion.group.slot.Slot", "hydra_tune.fusion"):
        assert f'"{name}",' in test
    assert " slot.Slot" in test
    docs = (root / "docs/groups.md").read_text()
    assert docs == "A seat is in `hydra_tune/fusion/group/slot.py`, a group in `fusion/group/group_trial.py`.\n"


def test_what_a_map_does_not_say_is_found(root, monkeypatch):
    monkeypatch.setattr(moves, "deeper", lambda text, depth: text.replace("isinstance", "issubclass"))
    with pytest.raises(moves.MoveError, match="issubclass"):
        moves.apply("move", root, RUFF)


@pytest.mark.parametrize(("old", "new"), [("seat =", "chair ="), (":Seat", ":Chair")])
def test_what_is_not_there_is_left_out_and_told(root, capsys, old, new):
    path = moves.MAPS / "move.toml"
    path.write_text(path.read_text().replace(old, new))
    moves.apply("move", root, RUFF)
    assert "left out" in capsys.readouterr().out
    assert (root / "hydra_tune/fusion/group/group_trial.py").exists()


def test_two_files_for_one_place_change_nothing(root):
    path = moves.MAPS / "move.toml"
    path.write_text(path.read_text().replace("group_trial", "slot"))
    with pytest.raises(moves.MoveError, match="two files"):
        moves.apply("move", root, RUFF)
    assert {path: (root / path).read_text() for path in FILES} == FILES
