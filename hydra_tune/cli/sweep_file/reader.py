"""Reads a sweep file into a `SweepSpec`, or lists all problems of the file with their places.

Reading creates nothing and runs no user code. The commands `sweep`, `plan` and `check` (in `cli/commands/`) call
`read_sweep_file` on the given file, before torch is imported. `cli/inspect/run_scan.py` reads a sweep file that names a
run, and every YAML file of a folder, and passes over files of the folder that are no sweep files. The module must not
know tuners or import torch.
"""

import keyword
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hydra_tune.cli.sweep_file import sweep_model
from hydra_tune.cli.sweep_file.domains import Domain, grid_size
from hydra_tune.cli.sweep_file.messages import as_written, describe, message
from hydra_tune.cli.sweep_file.spec import STOP_SECONDS, PruningRule, SweepSpec
from hydra_tune.cli.sweep_file.yaml_marks import YamlDocument, YamlPosition, YamlProblem, read_yaml
from hydra_tune.errors import SweepFileError, did_you_mean

_MAX_GRID = 100_000
_PARAMETER = 2  # length of a parameter's path
_ENGINE = (
    "devices",
    "device_memory",
    "host_memory",
    "spill_dir",
    "policy",
    "buffer_fraction",
    "max_concurrent",
    "admission",
    "num_shards",
    "optimizer_placement",
    "fusion",
    "fusion_size",
    "fusion_compile",
    "fusion_planner",
    "event_log_limit",
    "loader_warning",
    "loader_timeout",
    "max_retries",
)


def read_sweep_file(path: Path) -> SweepSpec:
    """Read and check a sweep file.

    Raises:
        SweepFileError: the file cannot be read; or the file has problems, with one line `file:line:column: what` for
            each problem, in file order.
    """
    file_name = str(path)
    marked = _read(path)
    problems = list(marked.problems)
    model = None
    # After a syntax error there is no data, and the syntax error says enough.
    if not isinstance(marked.data, dict):
        if not problems:
            problems.append(YamlProblem(marked.mark(()), _not_a_map(marked.data)))
    else:
        model = _validate(marked, problems)
    if model is not None:
        problems.extend(_contradictions(model, marked))
    if problems or model is None:
        raise SweepFileError("\n".join(_lines(file_name, problems)))
    return _spec(file_name, model, marked)


def _read(path: Path) -> YamlDocument:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SweepFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # Some editors begin a file with a byte order mark.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        # `rfind` gives -1 on the first line, so columns count from 1 everywhere.
        mark = YamlPosition(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        return YamlDocument(None, {}, {}, (YamlProblem(mark, "not text in UTF-8"),))
    return read_yaml(text)


def _not_a_map(data: Any) -> str:
    if data is None:
        return "the file is empty; it needs at least task and metric"
    return f"a sweep file is a map of keys such as task: and metric:, not {describe(data)}"


def _lines(shown: str, problems: list[YamlProblem]) -> Iterator[str]:
    # By place, as a reader goes through the file.
    for problem in sorted(set(problems)):
        yield f"{shown}:{problem.mark.line}:{problem.mark.column}: {problem.text}"


def _validate(marked: YamlDocument, problems: list[YamlProblem]) -> sweep_model.SweepFileDocument | None:
    try:
        return sweep_model.SweepFileDocument.model_validate(marked.data)
    except ValidationError as error:
        refused = {problem.mark for problem in problems}
        for detail in error.errors(include_url=False):
            problem = _problem(detail, marked)
            # A value refused by YAML is None in the data: a model's complaint about the same place is no news.
            if problem.mark not in refused:
                problems.append(problem)
        return None


def _problem(detail: Mapping[str, Any], marked: YamlDocument) -> YamlProblem:
    path, missing = _locate(detail["loc"], marked.data)
    kind = detail["type"]
    name = ".".join(map(str, path))
    if kind == "extra_forbidden":
        if path[0] == "hydra" and path[-1] in sweep_model.FORMER_NAMES:
            present_name = sweep_model.FORMER_NAMES[path[-1]]
            return YamlProblem(
                marked.mark(path), f"{name} is the former name of {present_name}, which is given as well; leave it out"
            )
        block = _model_at(path[:-1], marked.data)
        hint = did_you_mean(str(path[-1]), block.model_fields) or f"known are {', '.join(block.model_fields)}"
        return YamlProblem(marked.mark(path), f"unknown key {name!r}; {hint}")
    if kind == "missing":
        # A missing key has no place of its own: the key of the map that lacks it stands in.
        place = marked.keys.get(path) or marked.mark(path)
        return YamlProblem(place, f"{'.'.join((*map(str, path), *missing))} is missing")
    # The error of `ParameterSection.domain`: the keys of a parameter contradict each other.
    if kind == "parameter":
        return YamlProblem(marked.mark(path), f"{name}: {detail['msg']}")
    hint = _as_parameter(path[1], detail["input"]) if path[:1] == ("parameters",) and len(path) == _PARAMETER else ""
    if path == ("metric",) and isinstance(detail["input"], list):
        hint = "; a file has one metric: for several use create_study(directions=...)"
    # Point at a wrong value itself, not at its key.
    return YamlProblem(marked.value_mark(path), f"{name}: {message(detail)}{hint}")


def _as_parameter(name: Any, value: Any) -> str:
    key = "values" if isinstance(value, list) else "value"
    return f"; for {'a choice' if key == 'values' else 'a fixed value'} write {name}: {{{key}: {as_written(value)}}}"


def _locate(loc: tuple[Any, ...], data: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Split pydantic's location into the existing path and the missing rest; tags of a union are in neither."""
    path: list[Any] = []
    for index, part in enumerate(loc):
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
        elif index == len(loc) - 1:
            return tuple(path), (str(part),)
        else:
            continue
        path.append(part)
    return tuple(path), ()


def _model_at(path: tuple[Any, ...], data: Any) -> type[BaseModel]:
    match path:
        case ("parameters", _):
            return sweep_model.ParameterSection
        case ("metric",):
            return sweep_model.MetricSection
        case ("hydra",):
            return sweep_model.HydraSection
        case ("early_terminate",):
            return sweep_model.PRUNING[data["early_terminate"]["type"]]
        case _:
            return sweep_model.SweepFileDocument


def _contradictions(model: sweep_model.SweepFileDocument, marked: YamlDocument) -> Iterator[YamlProblem]:
    for name in model.parameters or ():
        if not name.isidentifier() or keyword.iskeyword(name):
            yield YamlProblem(
                marked.mark(("parameters", name)),
                f"parameters.{name}: cannot be the name of an argument; the function is called with name=value",
            )
    if model.method == "grid":
        yield from _grid_problems(model, marked)
    if model.hydra.weights_dir is not None and model.hydra.keep_best is None:
        yield YamlProblem(
            marked.mark(("hydra", "weights_dir")),
            "hydra.weights_dir: is where weights are kept, and none are; add keep_best: 1 or more",
        )
    pruning = model.early_terminate
    if isinstance(pruning, sweep_model.HyperbandSection) and pruning.min_iter > (pruning.max_iter or pruning.min_iter):
        yield YamlProblem(
            marked.value_mark(("early_terminate", "max_iter")),
            f"early_terminate: min_iter ({pruning.min_iter}) must be <= max_iter ({pruning.max_iter})",
        )


def _grid_problems(model: sweep_model.SweepFileDocument, marked: YamlDocument) -> Iterator[YamlProblem]:
    if model.parameters is None:
        yield YamlProblem(marked.value_mark(("method",)), "method: grid needs parameters")
        return
    endless = [name for name, parameter in model.parameters.items() if parameter.domain().grid() is None]
    for name in endless:
        yield YamlProblem(
            marked.mark(("parameters", name)),
            f"parameters.{name}: a grid needs values it can count; give values, whole min and max, or q",
        )
    # The other parameters alone may be too many, and both mistakes are shown at once.
    size = grid_size({name: parameter.domain() for name, parameter in model.parameters.items() if name not in endless})
    if size > _MAX_GRID:
        yield YamlProblem(marked.value_mark(("method",)), f"method: the grid has {size} points, more than {_MAX_GRID}")


def _spec(shown: str, model: sweep_model.SweepFileDocument, marked: YamlDocument) -> SweepSpec:
    pruning = model.early_terminate
    hydra_options = model.hydra.model_dump(exclude_none=True)
    return SweepSpec(
        file=shown,
        task=model.task,
        metric=model.metric.name,
        goal=model.metric.goal,
        method=model.method,
        parameters=_domains(model),
        run_cap=model.run_cap,
        pruning=None if pruning is None else _pruning(pruning),
        seed=model.seed,
        name=model.name,
        study=model.hydra.study or model.name,
        storage=model.hydra.storage,
        keep_best=model.hydra.keep_best,
        weights_dir=model.hydra.weights_dir,
        checkpoint_dir=model.hydra.checkpoint_dir,
        checkpoint_every=model.hydra.checkpoint_every,
        stop_seconds=model.hydra.stop_seconds or STOP_SECONDS,
        engine={key: hydra_options[key] for key in _ENGINE if key in hydra_options},
        places={
            _dotted(path): f"{shown}:{mark.line}:{mark.column}"
            for path in marked.keys
            for mark in (_place(path, marked),)
        },
    )


def _dotted(path: tuple[Any, ...]) -> str:
    """Return the path in messages, with the present name of a key that is given under its former name."""
    names = tuple(map(str, path))
    if len(names) > 1 and names[0] == "hydra":
        names = (names[0], sweep_model.FORMER_NAMES.get(names[1], names[1]), *names[2:])
    return ".".join(names)


def _pruning(block: sweep_model.EarlyTerminate) -> PruningRule:
    return PruningRule(type=block.type, options=block.model_dump(exclude={"type"}, exclude_none=True))


def _domains(model: sweep_model.SweepFileDocument) -> Mapping[str, Domain] | None:
    if model.parameters is None:
        return None
    return {name: parameter.domain() for name, parameter in model.parameters.items()}


def _place(path: tuple[Any, ...], marked: YamlDocument) -> YamlPosition:
    """Return the place for messages: at and below `parameters` the key, elsewhere the value of the key."""
    return marked.mark(path) if path[0] == "parameters" else marked.value_mark(path)
