"""Sphinx configuration of the site: `make docs` builds the site into `build/site`."""

import re
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from sphinx.ext.autodoc import mock
from sphinx.util import inspect
from sphinx_click.ext import ClickDirective

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]

from hydra_tune import __version__  # noqa: E402 - found through the path set above

project, author, copyright = "hydra-tune", "the hydra-tune developers", "the hydra-tune developers"  # noqa: A001
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_static"]
nitpicky = False  # signatures name types of torch, whose pages a build must not need
default_role = "py:obj"  # docstrings have names and values in single backticks; a name that the site knows is a link
smartquotes = False  # options begin with two dashes
html_theme = "furo"
html_title = "hydra-tune"
html_copy_source = False
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
_OPTIONAL = ("accelerate", "lightning", "optuna", "ray", "torchmetrics", "transformers")
# The integrations' pages need no more of these packages than names to inherit from.
autodoc_mock_imports = [name for name in _OPTIONAL if find_spec(name) is None]
python_maximum_signature_line_length = 100
napoleon_google_docstring, napoleon_numpy_docstring = True, False
linkcheck_timeout = 20

if autodoc_mock_imports:
    # Annotations have unions of what stands in (`Checkpoint | None`).
    with mock(autodoc_mock_imports):
        _stand_in = type(import_module(autodoc_mock_imports[0]).Anything).__mro__[-2]
    _stand_in.__or__ = _stand_in.__ror__ = lambda self, _other: self

if "ray" in autodoc_mock_imports:
    # `hydra_tune_ray` asks for the version of Ray before its first import of Ray.
    _version = metadata.version
    metadata.version = lambda name: "2.60" if name == "ray" else _version(name)


class Command(ClickDirective):
    """A command's usage and options, without a heading: the page has a heading, which other pages can link to."""

    def run(self):
        return [node for section in super().run() for node in section.children[1:]]


def readable(_app, what, _name, _obj, _options, lines):
    """Link pages that docstrings name by their files, and keep two things from being read as markup."""
    lines[:] = [re.sub(r"`?docs/([a-z-]+/[a-z-]+)\.md`?", r":doc:`/\1`", line) for line in lines]
    # `val_<name>` would be the title `val_` of a link to `name`.
    lines[:] = [re.sub(r"(?<!`)`([^`]*<[^`]*)`(?!`)", r"``\1``", line) for line in lines]
    # Napoleon would take a property's text up to the first colon for the property's type.
    if what in ("attribute", "property") and lines:
        lines.insert(0, "\\ ")  # an escaped space: nothing on the page, and no colon


def signature_of(_app, what, _name, obj, _options, _signature, _returns):
    """Take the arguments of `__init__` where a class also has a `__new__` that passes on whatever comes."""
    if what != "class" or not {"__new__", "__init__"} <= vars(obj).keys():
        return None
    signature = inspect.signature(obj.__init__, bound_method=True)
    return inspect.stringify_signature(signature, show_return_annotation=False, unqualified_typehints=True), None


def setup(app):
    app.add_directive("click", Command, override=True)
    app.connect("autodoc-process-docstring", readable, priority=400)  # before napoleon's 500
    app.connect("autodoc-process-signature", signature_of)
