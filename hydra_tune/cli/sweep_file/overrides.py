"""`--set NAME=VALUE`: overrides fixed parameters of a sweep file on the command line.

`cli/commands/sweep.py`, `cli/commands/plan.py` and `cli/commands/check.py` declare the option by `set_option`, and
apply its values by `with_settings` right after the file is read. The module must not know tuners or load torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import click
from pydantic import ValidationError

from hydra_tune.cli.sweep_file.domains import ChoiceDomain, Domain, Scalar
from hydra_tune.cli.sweep_file.messages import message
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.cli.sweep_file.sweep_model import ParameterSection
from hydra_tune.cli.sweep_file.yaml_marks import read_yaml
from hydra_tune.errors import SweepFileError, did_you_mean


def set_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--set` to a command that reads a sweep file; `settings` is a tuple of the written texts."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Change a parameter that FILE fixes with value:; may be given several times.",
    )(command)


def with_settings(spec: SweepSpec, settings: Iterable[str]) -> SweepSpec:
    """Override fixed parameters of a file's sweep; return the sweep to run.

    The settings are `name=value` each; values are read as in the file, so `3` is a number and `null` is no value.

    Raises:
        SweepFileError: an invalid setting, or a setting of a parameter that the file does not fix; one line for each.
    """
    values: dict[str, Domain] = {}
    problems = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            _check_fixed(spec, name if equals else "", values)
            values[name] = ChoiceDomain(values=(_value(text),))
        except SweepFileError as error:
            problems.append(f"--set {setting}: {error}")
    if problems:
        raise SweepFileError("\n".join(problems))
    # An empty tuple of settings must leave a file without parameters as it is.
    return replace(spec, parameters={**(spec.parameters or {}), **values}) if values else spec


def _check_fixed(spec: SweepSpec, name: str, earlier: Mapping[str, Domain]) -> None:
    if not name:
        raise SweepFileError("must be NAME=VALUE, e.g. --set epochs=3")
    if name in earlier:
        raise SweepFileError(f"{name} is set twice; give one value")
    if spec.parameters is None:
        raise SweepFileError(f"{spec.file} has no parameters:, so {spec.task} draws them itself; set it there")
    if name not in spec.parameters:
        hint = did_you_mean(name, _fixed(spec.parameters)) or _which(spec.parameters)
        raise SweepFileError(f"{spec.file} has no parameter {name!r}; {hint}")
    if name not in _fixed(spec.parameters):
        raise SweepFileError(
            f"{spec.at(f'parameters.{name}')} is searched, not fixed; change its range there, or fix it with value:"
        )


def _fixed(parameters: Mapping[str, Domain]) -> list[str]:
    return [name for name, domain in parameters.items() if isinstance(domain, ChoiceDomain) and len(domain.values) == 1]


def _which(parameters: Mapping[str, Domain]) -> str:
    fixed = _fixed(parameters)
    fixes = f"the file fixes {', '.join(fixed)}" if fixed else "the file fixes none with value:"
    return f"{fixes}; --set changes parameters alone, so change any other key in the file"


def _value(text: str) -> Scalar:
    if not text.strip():
        raise SweepFileError("has no value; for no value write null, for empty text ''")
    document = read_yaml(text)
    if document.problems:
        raise SweepFileError(f"{document.problems[0].text}; put the value in quotes of its own if you mean text")
    try:
        # The file's own model, so that a value is checked as if it stood in the file.
        return ParameterSection.model_validate({"value": document.data}).value
    except ValidationError as error:
        reason = message(error.errors(include_url=False)[0])
        raise SweepFileError(f"{reason}; put the value in quotes of its own if you mean text") from error
