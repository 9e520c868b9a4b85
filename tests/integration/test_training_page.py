"""The guides name every argument of a task, and every option of a pool with its default.

`tests/docs/test_blocks.py` runs the guides' programs, which compare their recipes with the plain loop themselves.
"""

import re
from dataclasses import fields
from inspect import signature

import pytest

from hydra_tune import HydraExecutor, TrainTask
from tests.docs.pages import DOCS

GUIDES = "".join(
    (DOCS / "howto" / page).read_text(encoding="utf-8") for page in ("plain-loop.md", "data.md", "metrics.md")
)
OPTIONS = (DOCS / "howto" / "options.md").read_text(encoding="utf-8")


def shown(default):
    if isinstance(default, str):
        return f'`"{default}"`'
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("name", [field.name for field in fields(TrainTask)])
def test_every_argument_of_a_task_is_named(name):
    assert re.search(rf"\b{name}=|`{name}`", GUIDES)


def test_the_table_has_every_option_of_a_pool_with_its_default():
    parameters = list(signature(HydraExecutor.__init__).parameters.values())[1:]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", OPTIONS, re.MULTILINE)
    assert sorted(rows) == sorted((option.name, shown(option.default)) for option in parameters)
