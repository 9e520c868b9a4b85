"""The command's own answers: help, version, and a file that cannot be used; none of them needs the engine."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from hydra_tune import __version__
from hydra_tune.cli import main


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("task: train:build\nmetric: {name: val_loss}\nrun_cap: none\n")
    return path


def test_version():
    assert CliRunner().invoke(main, ["--version"]).output == f"hydra-tune, version {__version__}\n"


def test_help_names_every_option_and_exit_code():
    text = CliRunner().invoke(main, ["sweep", "--help"]).output
    for word in (
        "--devices",
        "--device-memory",
        "--run-cap",
        "--timeout",
        "--json",
        "--no-live",
        "--max-concurrent",
        "--admission",
        "--policy",
        "--fuse",
        "--log",
        "--no-log",
        "--resume",
        "--checkpoint-dir",
        "--checkpoint-every",
        "--stop-seconds",
    ):
        assert word in text
    for code in (
        "  0    done\n",
        "  1    the sweep ended",
        "  2    the command",
        "  130  interrupted",
        "  143  interrupted",
    ):
        assert code in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_wrong_file_is_code_2_with_its_place_on_standard_error(space):
    result = CliRunner().invoke(main, ["sweep", str(space)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"{space}:3:10: run_cap: must be a whole number, not 'none'\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nowhere.yaml"],
        ["--run-cap", "0"],
        ["--device-memory", "much"],
        ["--timeout", "0"],
        ["--nope"],
        ["--checkpoint-every", "never"],
        ["--checkpoint-every", "0"],
        ["--stop-seconds", "0"],
    ],
)
def test_wrong_usage_is_code_2(space, arguments):
    file = [] if arguments in ([], ["nowhere.yaml"]) else [str(space)]
    assert CliRunner().invoke(main, ["sweep", *file, *arguments]).exit_code == 2


def test_a_wrong_file_is_told_without_importing_torch(space):
    code = (
        "import sys\n"
        "from hydra_tune.cli import main\n"
        "try:\n"
        "    main(['sweep', sys.argv[1]])\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, 'optuna' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(space)], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"


def test_going_on_with_nothing_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resumed_model.py").write_text("def build(lr): pass\n")
    (tmp_path / "space.yaml").write_text(
        "task: resumed_model:build\nmetric: {name: val_loss}\nname: first\nrun_cap: 1\nparameters: {lr: {value: 1.0}}\n"
        "hydra: {storage: 'sqlite:///trials.db', checkpoint_dir: saved, devices: 'cpu:1'}\n"
    )
    result = CliRunner().invoke(main, ["sweep", "space.yaml", "--resume", "--no-log"])
    assert result.exit_code == 2
    assert (
        f"there is no sweep 'first' in '{tmp_path}/saved' to go on with; give the command in the fold" in result.stderr
    )
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"resumed_model.py", "space.yaml"}


def test_ctrl_c_during_the_imports_is_code_130(space, monkeypatch):
    def interrupted(_file):
        raise KeyboardInterrupt

    monkeypatch.setattr("hydra_tune.cli.commands.plan.read_sweep_file", interrupted)
    result = CliRunner().invoke(main, ["plan", str(space)])
    assert (result.exit_code, result.output) == (130, "")


def test_a_text_that_the_terminal_cannot_show_is_escaped():
    @click.command()
    def says():
        sys.stdout.write("größe \udcff\n")

    main.add_command(says)
    try:
        assert CliRunner(charset="ascii").invoke(main, ["says"]).output == "gr\\xf6\\xdfe \\udcff\n"
    finally:
        del main.commands["says"]
