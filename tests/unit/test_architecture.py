"""The architecture page names the modules that are there, in the order that imports keep."""

import ast
import re
import tomllib
from pathlib import Path

import hydra_tune

ROOT = Path(__file__).parents[2]


def documented() -> list[str]:
    page = (ROOT / "docs" / "contributing" / "architecture.md").read_text()
    table = page[page.index("## Modules") :]
    return [name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)]


def test_every_module_is_on_the_page():
    package = ROOT / "hydra_tune"
    modules = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    modules |= {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    integrations = {path.name for path in (ROOT / "integrations").iterdir() if (path / "__init__.py").exists()}
    assert set(documented()) == modules | integrations


def test_the_page_shows_the_layers_in_their_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    shown = [name.removesuffix(".py") for name in documented() if not name.startswith("hydra_tune_")]
    assert shown == [layer.removeprefix("hydra_tune.") for layer in layers]


def test_files_that_the_pages_name_are_there():
    for name in ("architecture.md", "internals.md"):
        page = (ROOT / "docs" / "contributing" / name).read_text()
        for named in re.findall(r"`([\w/]+\.py)`", page):
            assert any((folder / named).exists() for folder in (ROOT, ROOT / "hydra_tune")), f"{name} names {named}"


def test_files_that_docstrings_name_are_there():
    for package in (ROOT / "hydra_tune", *(ROOT / "integrations").iterdir()):
        for path in package.rglob("*.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            for named in re.findall(r"`([\w/]+\.py)`", docstring):
                folders = (path.parent, package, ROOT, ROOT / "hydra_tune")
                assert any((folder / named).exists() for folder in folders), f"{path.relative_to(ROOT)} names {named}"


# How code asks whether a device is a GPU; whether a tensor's own device is "meta" is another question.
ASKS = re.compile(
    r"""\.type [!=]= (?!"meta")|\.type != device\.|\bshares_generator\b|\bis_host\b|cuda\.is_(available|initialized)"""
)
TELLS_NOTHING = {"train/data/worker_parts.py"}  # of tensors that processes may share


def test_every_place_where_gpus_differ_is_on_their_page():
    package, page = ROOT / "hydra_tune", (ROOT / "docs" / "contributing" / "gpu-differences.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "devices" not in path.parts and ASKS.search(path.read_text())
    }
    assert asking - TELLS_NOTHING - named == set(), "gpu-differences.md does not say what differs there"
    assert {name for name in named if not (package / name).exists()} == set()


def test_type_checkers_see_every_public_name():
    """Names are imported on first use, which a type checker does not follow."""
    body = ast.parse((ROOT / "hydra_tune" / "__init__.pyi").read_text()).body
    stubs = {name.asname: node.module for node in body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert stubs == hydra_tune._HOMES
