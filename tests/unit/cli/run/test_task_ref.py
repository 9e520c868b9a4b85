"""`task: module:function` is found beside the sweep file; what is wrong with it is told at its place in the file."""

import sys
from textwrap import dedent

import pytest

from hydra_tune.cli.run.task_ref import load_task
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.errors import SweepFileError

MODULE = """
class Space:
    @staticmethod
    def build(trial):
        return trial

def build(lr, width=64):
    return lr, width

def anything(**params):
    return params

def by_place(lr, /):
    return lr

def nothing():
    return None

text = "build"
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)

    def load_from(task, parameters=None, module=MODULE):
        (tmp_path / "mymodel.py").write_text(dedent(module))
        lines = [f"task: {task}", "metric: {name: val_loss}"]
        if parameters:
            lines += ["parameters:", *(f"  {name}: {{value: 1}}" for name in parameters)]
        (tmp_path / "space.yaml").write_text("\n".join(lines))
        return load_task(read_sweep_file((tmp_path / "space.yaml").relative_to(tmp_path)))

    return load_from


@pytest.fixture
def problems(load):
    def problems_of(*args, **more):
        with pytest.raises(SweepFileError) as caught:
            load(*args, **more)
        return str(caught.value).splitlines()

    return problems_of


def test_a_function_beside_the_file(load):
    assert load("mymodel:build", ["lr"])(lr=1) == (1, 64)


def test_a_function_that_takes_the_trial(load):
    assert load("mymodel:Space.build")("trial") == "trial"


def test_a_function_that_takes_anything(load):
    assert load("mymodel:anything", ["lr", "more"])(lr=1) == {"lr": 1}


@pytest.mark.parametrize("task", ["mymodel", "mymodel:", ":build", "my-model:build", "a:b:c"])
def test_not_a_reference(problems, task):
    assert problems(f"'{task}'") == [f"space.yaml:1:7: task: must be module:function, e.g. train:build, not {task!r}"]


def test_no_such_module(problems, tmp_path):
    assert problems("mymodell:build") == [
        (
            f"space.yaml:1:7: task: there is no module 'mymodell' in {tmp_path} or the environment; "
            "did you mean 'mymodel'?"
        )
    ]
    assert problems("mymodel.py:build") == [
        (
            f"space.yaml:1:7: task: there is no module 'mymodel.py' in {tmp_path} or the environment; "
            f"did you mean 'mymodel'?"
        )
    ]


def test_no_such_function(problems):
    assert problems("mymodel:buid") == ["space.yaml:1:7: task: module 'mymodel' has no 'buid'; did you mean 'build'?"]


def test_not_a_function(problems):
    assert problems("mymodel:text") == ["space.yaml:1:7: task: mymodel:text is not a function, but str"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found' (mymodel.py:1)"),
        ("\n\n1 / 0", "ZeroDivisionError: division by zero (mymodel.py:3)"),
        ("def f(:", "SyntaxError: invalid syntax (mymodel.py, line 1)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (mymodel.py:2)"),
    ],
)
def test_a_module_that_does_not_import(problems, module, why):
    assert problems("mymodel:build", module=module) == [f"space.yaml:1:7: task: mymodel does not import: {why}"]


def test_arguments_that_do_not_match_the_parameters(problems):
    assert problems("mymodel:build", ["widht", "depth"]) == [
        "space.yaml:1:7: task: mymodel:build needs 'lr', which is not among the parameters",
        "space.yaml:4:3: parameters.widht: mymodel:build takes no argument 'widht'; did you mean 'width'?",
        "space.yaml:5:3: parameters.depth: mymodel:build takes no argument 'depth'; it takes lr, width",
    ]
    assert problems("mymodel:by_place", ["lr"])[0] == (
        "space.yaml:1:7: task: mymodel:by_place takes 'lr' by position only; drop the '/'"
    )


def test_a_function_that_takes_no_trial(problems):
    assert problems("mymodel:nothing") == [
        (
            "space.yaml:1:7: task: mymodel:nothing is called with the trial, as the file has no parameters:, "
            "but too many positional arguments"
        )
    ]


def test_the_folder_of_the_file_goes_before_all_others(load, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mymodel.py").write_text("def build(trial): raise AssertionError('of another folder')")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path, str(tmp_path)])
    assert load("mymodel:build", ["lr"])(3) == (3, 64)


@pytest.mark.parametrize("name", ["json", "_thread"])
def test_another_module_of_the_same_name_is_not_taken_for_the_one_beside_the_file(problems, tmp_path, name):
    (tmp_path / f"{name}.py").write_text(MODULE)
    (problem,) = problems(f"{name}:build", ["lr"])
    assert "has the same name; rename yours" in problem
    assert str(tmp_path / f"{name}.py") in problem


def test_another_module_of_the_same_name_is_not_taken_for_the_package_beside_the_file(problems, tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text(MODULE)
    (problem,) = problems("json:build", ["lr"])
    assert "has the same name; rename yours" in problem


def test_a_package_beside_the_file_may_have_a_package_of_any_name(load, tmp_path):
    (tmp_path / "packed" / "cli").mkdir(parents=True)
    (tmp_path / "packed" / "cli" / "__init__.py").touch()
    (tmp_path / "packed" / "__init__.py").write_text(dedent(MODULE))
    assert load("packed:build", ["lr"])(3) == (3, 64)
