"""How a sweep goes on: the command as the user has typed it, without passwords, and the advice."""

import pytest

from hydra_tune.cli.commands.sweep import sweep
from hydra_tune.cli.display.next_step import command_of, how_to_go_on, masked


def command(*arguments):
    with sweep.make_context("sweep", list(arguments)) as context:
        return command_of(context)


def test_the_command_has_what_was_typed_and_belongs_to_the_sweep(tmp_path):
    file = tmp_path / "a space.yaml"
    file.touch()
    assert command(str(file)) == f"hydra-tune sweep '{file}'"
    typed = [
        "--set",
        "a=1",
        "--set",
        "b=x y",
        "--run-cap",
        "3",
        "--no-isolate",
        "--fuse",
        "on",
        "--checkpoint-every",
        "7",
    ]
    once = ["--resume", "--json", "--no-live", "--log", "x.jsonl", "--timeline", "t.json"]
    assert command(str(file), *typed, *once) == (
        f"hydra-tune sweep '{file}' --set a=1 --set 'b=x y' --fusion on --run-cap 3 --checkpoint-every 7 --no-isolate"
    )
    stored = command(str(file), "--storage", "postgresql://me:secret@host/db")
    assert "secret" not in stored
    assert "me:***@host/db" in stored


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql+pymysql://u:p@ss@h/db", "mysql+pymysql://u:***@h/db"),
        ("postgresql://u:pa/ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p@h/db?options=a@b", "postgresql://u:***@h/db?options=a@b"),
        ("postgresql://h/db?user=u&password=p%40ss&x=1", "postgresql://h/db?user=u&password=***&x=1"),
        ("'mysql://h/db?passwd=secret' --resume", "'mysql://h/db?passwd=***' --resume"),
        (
            "mssql://h/?odbc_connect=UID%3Du%3BPWD%3Dse%21cret%3BPort%3D1",
            "mssql://h/?odbc_connect=UID%3Du%3BPWD%3D***%3BPort%3D1",
        ),
        ("hydra-tune sweep --set password=word", "hydra-tune sweep --set password=word"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("postgresql://h:5432/db?options=a@b", "postgresql://h:5432/db?options=a@b"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
    ],
)
def test_only_passwords_are_masked(url, shown):
    assert masked(url) == shown


def test_the_advice_depends_on_what_is_kept():
    assert (
        how_to_go_on("hydra-tune sweep s.yaml", is_kept=True, saves=True)
        == "to go on: hydra-tune sweep s.yaml --resume"
    )
    assert how_to_go_on("hydra-tune sweep s.yaml", is_kept=True, saves=False).startswith(
        "to go on: hydra-tune sweep s.yaml (running trials begin anew"
    )
    assert "was kept in memory; give hydra.storage" in how_to_go_on("x", is_kept=False, saves=False)
