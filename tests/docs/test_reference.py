"""The site, built once: every public name, every attribute and argument, and every option of the command line is there."""

import importlib
import inspect
import re
import subprocess
import sys
from html import unescape

import pytest

import hydra_tune
from hydra_tune import errors
from hydra_tune.cli import main
from tests.docs.pages import DOCS, ROOT

PACKAGES = ("hydra_tune", "hydra_tune_lightning", "hydra_tune_optuna", "hydra_tune_ray", "hydra_tune_transformers")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site in HTML, with all warnings of the builder."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, folder / "html"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
    )
    # `make docs` fails at warnings about the other pages.
    ours = [line for line in done.stderr.splitlines() if "reference/" in line or "docstring of" in line]
    return folder / "html", ours


@pytest.fixture(scope="module")
def api(site):
    return "".join((site[0] / "reference" / f"{name}.html").read_text() for name in ("api", "integrations"))


def public_names(package):
    module = importlib.import_module(package)
    own = [getattr(module, name) for name in module.__all__]
    return [
        name
        for name, value in zip(module.__all__, own, strict=True)
        if getattr(value, "__module__", "").startswith("hydra_tune") and not inspect.ismodule(value)
    ]


@pytest.mark.timeout(300)
def test_docstrings_and_reference_have_no_warnings(site):
    assert site[1] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(api, package):
    if package != "hydra_tune":
        pytest.importorskip({"hydra_tune_optuna": "optuna", "hydra_tune_ray": "ray"}.get(package, "accelerate"))
    assert public_names(package) != []
    assert [name for name in public_names(package) if f'id="{package}.{name}"' not in api] == []


@pytest.mark.timeout(300)
def test_every_error_is_in_the_reference(api):
    raised = [value for name, value in vars(errors).items() if inspect.isclass(value) and not name.startswith("_")]
    ours = [error.__name__ for error in raised if error.__module__ == errors.__name__]
    assert [name for name in ours if f'id="hydra_tune.{name}"' not in api and f'errors.{name}"' not in api] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["EventStream", "HydraExecutor", "Job", "Result", "SharedModule"])
def test_every_method_for_users_is_in_the_reference(api, name):
    members = [
        member
        for member, value in inspect.getmembers(getattr(hydra_tune, name))
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]
    # Called by the pool, as a comment in `pool/job.py` and a docstring in `train/trained.py` say.
    internal = {"enter", "hold", "end", "keep"}
    assert [
        member for member in members if f'id="hydra_tune.{name}.{member}"' not in api and member not in internal
    ] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["HydraExecutor", "TrainTask"])
def test_every_argument_is_explained(api, name):
    """In the list of the class's parameters, and in the signature."""
    start = api.index(f'id="hydra_tune.{name}"')
    entry = api[start : api.index('id="hydra_tune.', start + 20)]
    signature = inspect.signature(getattr(hydra_tune, name).__init__)
    for argument in list(signature.parameters)[1:]:
        assert f"<strong>{argument}</strong>" in entry
        assert f'<span class="n"><span class="pre">{argument}</span></span>' in entry


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", main.commands)
def test_every_option_is_on_the_page_of_the_command_line(site, name):
    text = unescape(re.sub(r"<[^>]+>", "", (site[0] / "reference" / "cli.html").read_text()))
    start = re.search(rf"^hydra-tune {name} (?:\[OPTIONS\]|\[|[A-Z])", text, re.MULTILINE).start()
    following = re.search(r"\nhydra-tune [a-z]+ (?:\[|[A-Z])", text[start + 1 :])
    entry = text[start : start + 1 + following.start()] if following else text[start:]
    for parameter in main.commands[name].params:
        for option in parameter.opts if parameter.opts[0].startswith("--") else ():
            assert option in entry
            assert " ".join(parameter.help.split()) in " ".join(entry.split())
