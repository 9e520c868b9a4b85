"""Says how a sweep goes on: after an interruption or a kill, and where nothing is left to run.

`SweepProgressTracker` (`board.py`) adds the advice to the summary of a sweep, and `hydra-tune status`
(`cli/inspect/run_scan.py`) gives the same advice about a run of another process. `cli/commands/sweep.py` notes the
command by `command_of`. Every URL of a storage that people may read goes through `masked` first: in `board.py`, in
`cli/dry_run/checking.py`, in `cli/inspect/run_scan.py` and `cli/inspect/run_output.py`, and in
`integrations/hydra_tune_optuna/study_reader.py` and `integrations/hydra_tune_optuna/sweep.py`. The module must not import
torch, because `cli/root.py` imports the module with `hydra-tune sweep`.
"""

import re
import shlex

import click
from click.core import ParameterSource

# SQLAlchemy takes everything before the first "@" as the password, also slashes. A password may have an "@" that the user
# has not escaped, so the mask reaches to the last "@" before the next slash. A number before a slash is a port.
_PASSWORD = re.compile(r"(://[^:/@\s]*):(?!\d+/)[^@\s]*@(?:[^/\s]*@)?")
# Drivers take passwords as options of the URL, too; those of `odbc_connect` may be escaped.
_OPTION = re.compile(
    r"((?:[?&;=]|%3[BD])(?:ssl)?(?:passw(?:or)?d|pwd)(?:=|%3D))(?:(?!%3B|%26)[^&;\s'\"])*", re.IGNORECASE
)
_ONCE = frozenset({"resume", "as_json", "no_live", "event_log", "timeline"})  # of one run, not of the sweep


def masked(text: str) -> str:
    """Replace the passwords of a database's URL, for places that other people read."""
    return _OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def command_of(context: click.Context) -> str:
    """Command that runs the same sweep again: the file and the typed options, without options of one run and passwords."""
    words = ["hydra-tune", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in _ONCE or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for single_value in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(single_value)]
    return masked(shlex.join(words))


def how_to_go_on(command: str, *, is_kept: bool, saves: bool) -> str:
    """Describe how an interrupted sweep goes on.

    `is_kept` tells whether the study is in a storage, under a name; `saves`, whether running trials have checkpoints.
    """
    if not is_kept:
        return (
            "the sweep cannot go on, because its study was kept in memory; give hydra.storage and a name, and "
            "hydra.checkpoint_dir for running trials"
        )
    if saves:
        return f"to go on: {command} --resume"
    return f"to go on: {command} (running trials begin anew; hydra.checkpoint_dir would save them)"


def how_to_run_more(num_trials: int, file: str, *, is_grid: bool) -> str:
    """Describe why a finished study runs nothing, and how more trials can run."""
    if is_grid:
        return f"nothing was left to run: all {num_trials} points of the grid are there; add values in {file}"
    return f"run_cap reached: the study has all of its {num_trials} trials; raise it, as run_cap in {file} or with --run-cap"
