"""The built wheel serves without the source: the README's program and a first sweep, from a folder of installed files."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, PageCode

WHERE = "import hydra_tune, hydra_tune_optuna; print(hydra_tune.__file__, hydra_tune_optuna.__file__, sep='\\n')"
COMMAND = "import sys; from hydra_tune.cli import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python in an empty folder, where the wheel's files come before those of an editable installation."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, capture_output=True, text=True, check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "site"]
    subprocess.run([*install, folder / built.stdout.split()[-1]], capture_output=True, check=True)
    empty = folder / "empty"
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}

    def run(*arguments, cwd=empty):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    for path in run("-c", WHERE).split():
        assert path.startswith(str(folder / "site")), path
    run.empty = empty
    return run


@pytest.mark.timeout(240)
def test_the_readmes_program_runs(run):
    assert "'width'" in run("-c", PageCode.of(ROOT / "README.md").program)


@pytest.mark.timeout(240)
def test_a_first_sweep_runs(run):
    run("-c", COMMAND, "init", "first")
    shown = run("-c", COMMAND, "sweep", "space.yaml", "--run-cap", "2", "--set", "epochs=2", cwd=run.empty / "first")
    assert "best: trial" in shown
