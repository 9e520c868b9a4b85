"""Sphinx configuration of the site: `make docs` builds the site into `build/site`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]

from hydra_tune import __version__  # noqa: E402 - found through the path set above

project, author, copyright = "hydra-tune", "the hydra-tune developers", "the hydra-tune developers"  # noqa: A001
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_static"]
nitpicky = False  # signatures name types of torch, whose pages a build must not need
html_theme = "furo"
html_title = "hydra-tune"
html_copy_source = False
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
linkcheck_timeout = 20
