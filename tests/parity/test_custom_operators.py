"""Models with operators of `torch.library.custom_op`: cut bit for bit, or whole, and never fused with wrong draws."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parity.observe import Way, watched_ways
from tests.parity.own_functions import Around
from tests.parity.test_fusion import TOLERANCE, fused, in_float64, worst
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, task, train
from tests.unit.shard.bench import bench, task_of

pytestmark = pytest.mark.usefixtures("captured_once")
SCALE = 1.5
CALLS = 0


def operator(body: Any, backward: Any, setup: Any, *, has_fake: bool = True) -> Any:
    """Register an operator of one tensor whose result is like its input."""
    made = torch.library.custom_op(f"hydra_tests::{body.__name__}", body, mutates_args=())
    if has_fake:
        made.register_fake(torch.empty_like)
    made.register_autograd(backward, setup_context=setup)
    return made


def saves_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def saves_output(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


def keeps_output(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kept = output


def passes_on(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.clone()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def squashed(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.detach().float().numpy())).to(x.dtype)


def kept(x: Tensor) -> Tensor:
    return x.tanh()


def masked(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.3)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def counted(x: Tensor) -> Tensor:
    global CALLS  # noqa: PLW0603 - what the test is about
    CALLS += 1
    return x * (1 + CALLS % 3)


def unknown(x: Tensor) -> Tensor:
    return x * 2


def tanh_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return gradient * (1 - y * y)


DOUBLED = operator(doubled, lambda _, gradient: gradient * 2, saves_nothing)
SQUASHED = operator(squashed, tanh_backward, saves_output)
KEPT = operator(kept, lambda ctx, gradient: gradient * (1 - ctx.kept * ctx.kept), keeps_output)
MASKED = operator(masked, lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0), saves_output)
SCALED = operator(scaled, lambda _, gradient: gradient * SCALE, saves_nothing)
COUNTED = operator(counted, passes_on, saves_nothing)
UNKNOWN = operator(unknown, passes_on, saves_nothing, has_fake=False)
OVERLOAD = torch.ops.hydra_tests.doubled.default
GELU = torch.ops.aten.gelu.default


def within_range(_: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("range"):
        return x.relu()


class CallsMasked(torch.autograd.Function):
    """Calls an operator that draws without saying so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.ops.hydra_tests.masked(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0] != 0)


KINDS = {
    "an operator": lambda _, x: DOUBLED(x),
    "its overload": lambda _, x: OVERLOAD(x),
    "an overload of torch": lambda _, x: GELU(x),
    "by its name": lambda _, x: torch.ops.hydra_tests.doubled(x),
    "numpy": lambda _, x: SQUASHED(x),
    "a tensor in its context": lambda _, x: KEPT(x),
    "a range of the profiler": within_range,
    "draws within a Function": lambda _, x: CallsMasked.apply(x),
    "draws": lambda _, x: MASKED(x),
}


class Holds(Around):
    """Has an operator among its attributes."""

    def __init__(self, own: Any) -> None:
        super().__init__(lambda module, x: module.called(x))
        self.called = own


def trained(model: Any, shards: int = 3, **changes: Any) -> Way:
    """How a task was run whose numbers are the plain loop's."""
    global CALLS  # noqa: PLW0603 - what a test is about
    described = task(model=model, validate=SAMPLES, batch_size=6, report_every=1, **changes)
    CALLS = 0
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=shards)
        CALLS = 0  # as where the trial began
        assert against_plain(described, result) == []
    return ways[id(described)]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate": 2}, {"precision": "bfloat16"}, {"activations": "keep"}, {"activations": "recompute"}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_an_operator_is_cut(kind, changes):
    assert trained(partial(Around, KINDS[kind]), **changes).shards["train"] == 3


@pytest.mark.parametrize(
    "own", [DOUBLED, OVERLOAD, torch.ops.hydra_tests.doubled], ids=["operator", "overload", "packet"]
)
def test_a_model_that_holds_an_operator_is_cut(own):
    assert trained(partial(Holds, own)).shards["train"] == 3


def test_a_global_that_an_operator_reads_may_change(monkeypatch):
    def change(_module: Any, _optimizer: Any, steps: int) -> None:
        monkeypatch.setattr(f"{__name__}.SCALE", 1.5 if steps % 2 else 0.5)

    described = task(model=partial(Around, lambda _, x: SCALED(x)), after_step=change, report_every=1)
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=3)
    monkeypatch.setattr(f"{__name__}.SCALE", 1.5)
    assert against_plain(described, result) == []
    assert ways[id(described)].shards == {"train": 3}


@pytest.mark.parametrize(
    ("own", "reason"),
    [(COUNTED, "changes the global 'CALLS'"), (UNKNOWN, "no fake impl registered")],
    ids=["counts", "no fake"],
)
def test_other_operators_run_whole(own, reason):
    way = trained(partial(Around, lambda _, x: own(x)))
    assert way.shards["train"] == 0
    assert reason in way.reasons["train"]


def test_a_tensor_in_the_context_is_not_kept_between_units():
    def costs(own: Any) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        step = lambda module, batch: functional.mse_loss(own(module(batch[0])), batch[1])  # noqa: E731
        made = bench(task_of(model, step=step))
        return made.pilot.cost_keeping(0, len(made.captured.nodes) - 1)

    assert costs(SQUASHED) is not None
    assert costs(KEPT) is None


def test_trials_with_operators_that_may_draw_are_not_fused(caplog):
    batches = [(X[:8], Y[:8])] * 3
    changes = {"model": partial(Around, KINDS["draws"]), "train": lambda: batches, "report_every": 1}
    results, reasons, is_fused = fused([task(seed=seed, **changes) for seed in (1, 2)], caplog)
    assert not is_fused
    assert any("hydra_tests.masked.default may draw random numbers" in reason for reason in reasons), reasons
    assert [result.error for result in results] == [None, None]


def test_trials_with_operators_of_torch_are_fused(caplog):
    batches = [(X[:8].double(), Y[:8])] * 3
    changes = {"model": partial(Around, KINDS["an overload of torch"]), "train": lambda: batches, "report_every": 1}
    described = [in_float64(task(seed=seed, **changes)) for seed in (1, 2)]
    results, reasons, is_fused = fused(described, caplog)
    assert is_fused, reasons
    assert max(worst(results, described)) < TOLERANCE
