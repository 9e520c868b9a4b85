"""Pydantic models of a sweep file: the keys, and the allowed values of each.

The models follow the file of Weights & Biases sweeps where both mean the same, plus one block `hydra:` for this package.
The module knows no positions and no tuner: `reader.py` validates the data of a file by the models, and converts
pydantic's errors to `file:line:column`, and the models to a `SweepSpec`; `overrides.py` validates the values of `--set`.
The field names here and `FORMER_NAMES` are all allowed keys. A key of `hydra:` for the executor must also be in the list
`_ENGINE` of `reader.py`, or its value is dropped. The module must not import torch.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from hydra_tune.checkpoint.every import parse_every
from hydra_tune.cli.sweep_file.distributions import check_distribution, to_domain
from hydra_tune.cli.sweep_file.domains import Domain, Scalar
from hydra_tune.cli.sweep_file.messages import describe
from hydra_tune.errors import ConfigError
from hydra_tune.quantities import parse_bytes, parse_seconds
from hydra_tune.schedule import check_policy_name

# As of `TrainTask.seed`: numpy takes no other.
_MAX_SEED = 2**32 - 1


class SweepFileSection(BaseModel):
    """A map of the file: unknown keys are errors, and `"3"` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all real ones
        return False


def _number(value: Any) -> float:
    """Check a number; an int stays an int, because whole limits mean whole numbers."""
    # A bool is an int to Python, and YAML's .inf and .nan are floats.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise PydanticCustomError("number", "must be a number, not {value}", {"value": describe(value)})
    return value


def _step(value: Any) -> float:
    if _number(value) <= 0:
        raise PydanticCustomError("number", "must be > 0, not {value}", {"value": describe(value)})
    return _number(value)


def _scalar(value: Any) -> Scalar:
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        kinds = "text, a number, true, false or null"
        raise PydanticCustomError("scalar", "must be {kinds}, not {got}", {"kinds": kinds, "got": describe(value)})
    return value


def _bytes(size: Any) -> str | int:
    try:
        parse_bytes(size, what="it")
    except ConfigError as error:
        # The reader puts the key's name in front. The text is a value, because pydantic reads braces in a template.
        raise PydanticCustomError("bytes", "{text}", {"text": str(error).removeprefix("it ")}) from error
    return size  # type: ignore[no-any-return]  # parse_bytes takes nothing else


def _shards(value: Any) -> int | Literal["layer", "tuned"]:
    if value in ("layer", "tuned") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value  # type: ignore[no-any-return]  # == does not tell mypy what it is
    raise PydanticCustomError(
        "shards", "must be a whole number of at least 1, layer or tuned, not {got}", {"got": describe(value)}
    )


def _buffer(value: Any) -> float | Literal["auto"]:
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1):
        return value  # type: ignore[no-any-return]  # as above
    raise PydanticCustomError("buffer", "must be auto, or from 0 to below 1, not {got}", {"got": describe(value)})


def _fusion(value: Any) -> Literal["auto", "on", "off"]:
    # YAML reads on and off as true and false.
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in ("auto", "on", "off"):
        raise PydanticCustomError("fusion", "must be auto, on or off, not {got}", {"got": describe(value)})
    return value  # type: ignore[no-any-return]  # as above


def _policy(name: Any) -> str:
    # Against the installed policies, since any package may add policies.
    if not isinstance(name, str):
        raise PydanticCustomError("policy", "must be text, not {got}", {"got": describe(name)})
    try:
        check_policy_name(name)
    except ConfigError as error:
        raise PydanticCustomError("policy", "{text}", {"text": str(error).removeprefix("policy ")}) from error
    return name


def _often(value: Any) -> str | int:
    try:
        parse_every(value)
    except ConfigError as error:
        raise PydanticCustomError("often", "{text}", {"text": str(error).removeprefix("checkpoint_every ")}) from error
    return value  # type: ignore[no-any-return]  # parse_every takes nothing else but None, which never comes here


def _seconds(value: Any) -> float:
    try:
        return parse_seconds(value, what="it")
    except ConfigError as error:
        raise PydanticCustomError("seconds", "{text}", {"text": str(error).removeprefix("it ")}) from error


Number = Annotated[float, PlainValidator(_number)]
Step = Annotated[float, PlainValidator(_step)]
AnyScalar = Annotated[Scalar, PlainValidator(_scalar)]
Shards = Annotated[int | Literal["layer", "tuned"], PlainValidator(_shards)]
Buffer = Annotated[float | Literal["auto"], PlainValidator(_buffer)]
Fusion = Annotated[Literal["auto", "on", "off"], PlainValidator(_fusion)]
Bytes = Annotated[str | int, PlainValidator(_bytes)]
Often = Annotated[str | int, PlainValidator(_often)]
Seconds = Annotated[float, PlainValidator(_seconds)]
PolicyName = Annotated[str, PlainValidator(_policy)]


def _distribution(name: Any) -> str:
    if not isinstance(name, str):
        raise PydanticCustomError("distribution", "must be text")
    try:
        check_distribution(name)
    except ConfigError as error:
        raise PydanticCustomError("distribution", "{text}", {"text": str(error)}) from error
    return name


class ParameterSection(SweepFileSection):
    """One entry of `parameters:`."""

    value: AnyScalar = None
    values: Annotated[list[AnyScalar], Field(min_length=1)] | None = None
    distribution: Annotated[str, PlainValidator(_distribution)] | None = None
    min: Number | None = None
    max: Number | None = None
    q: Step | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        # For its error alone: each key may be right by itself, and the keys contradict each other.
        self.domain()
        return self

    def domain(self) -> Domain:
        """Domain of the parameter."""
        # Only written keys: `value: null` is a constant, and a missing value is not.
        written_keys = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        try:
            return to_domain(written_keys)
        except ConfigError as error:
            raise PydanticCustomError("parameter", "{text}", {"text": str(error)}) from error


class MetricSection(SweepFileSection):
    """The metric that the sweep minimizes or maximizes."""

    name: Annotated[str, Field(min_length=1)]
    goal: Literal["minimize", "maximize"] = "minimize"


class HyperbandSection(SweepFileSection):
    """`early_terminate: {type: hyperband}`."""

    type: Literal["hyperband"]
    min_iter: Annotated[int, Field(ge=1)] = 1
    max_iter: Annotated[int, Field(ge=1)] | None = None
    eta: Annotated[int, Field(ge=2)] = 3


class SuccessiveHalvingSection(SweepFileSection):
    """`early_terminate: {type: successive_halving}`."""

    type: Literal["successive_halving"]
    min_iter: Annotated[int, Field(ge=1)] = 1
    eta: Annotated[int, Field(ge=2)] = 4
    min_early_stopping_rate: Annotated[int, Field(ge=0)] = 0


class MedianSection(SweepFileSection):
    """`early_terminate: {type: median}`."""

    type: Literal["median"]
    n_startup_trials: Annotated[int, Field(ge=0)] = 5
    n_warmup_steps: Annotated[int, Field(ge=0)] = 0
    interval_steps: Annotated[int, Field(ge=1)] = 1
    n_min_trials: Annotated[int, Field(ge=1)] = 1


EarlyTerminate = Annotated[HyperbandSection | SuccessiveHalvingSection | MedianSection, Field(discriminator="type")]
PRUNING: dict[str, type[SweepFileSection]] = {
    "hyperband": HyperbandSection,
    "successive_halving": SuccessiveHalvingSection,
    "median": MedianSection,
}


FORMER_NAMES = {name: name.replace("fuse", "fusion") for name in ("fuse", "fuse_size", "fuse_compile", "fuse_planner")}
"""Old keys of the block `hydra:` that are still read, with the present names."""


def _or(former: str) -> Any:
    # The present name comes first: pydantic takes the first name that is given, and refuses the other as unknown.
    return Field(validation_alias=AliasChoices(FORMER_NAMES[former], former))


class HydraSection(SweepFileSection):
    """Options of the sweep's pool, its storage, its checkpoints and the weights that are kept."""

    devices: Annotated[str, Field(min_length=1)] | None = None
    device_memory: Bytes | None = None
    host_memory: Bytes | None = None
    spill_dir: Annotated[str, Field(min_length=1)] | None = None
    policy: PolicyName | None = None
    buffer_fraction: Buffer | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    admission: Literal["auto", "eager", "staggered"] | None = None
    num_shards: Shards | None = None
    optimizer_placement: Literal["device", "host", "auto"] | None = None
    fusion: Annotated[Fusion | None, _or("fuse")] = None
    fusion_size: Annotated[Annotated[int, Field(ge=2)] | None, _or("fuse_size")] = None
    fusion_compile: Annotated[Annotated[str, Field(min_length=1)] | None, _or("fuse_compile")] = None
    fusion_planner: Annotated[Fusion | None, _or("fuse_planner")] = None
    event_log_limit: Bytes | None = None
    loader_warning: Seconds | None = None
    loader_timeout: Seconds | None = None
    max_retries: Annotated[int, Field(ge=0)] | None = None
    storage: Annotated[str, Field(min_length=1)] | None = None
    study: Annotated[str, Field(min_length=1)] | None = None
    keep_best: Annotated[int, Field(ge=1)] | None = None
    weights_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: Often | None = None
    stop_seconds: Seconds | None = None


class SweepFileDocument(SweepFileSection):
    """A whole sweep file."""

    task: Annotated[str, Field(min_length=1)]
    metric: MetricSection
    name: Annotated[str, Field(min_length=1)] | None = None
    description: str | None = None
    method: Literal["bayes", "random", "grid"] = "bayes"
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1)] | None = None
    run_cap: Annotated[int, Field(ge=1)] | None = None
    early_terminate: EarlyTerminate | None = None
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = None
    # One object for all documents, which is safe because sections are frozen.
    hydra: HydraSection = HydraSection()
