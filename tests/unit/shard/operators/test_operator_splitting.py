"""Operators in pieces give what the whole ones give, look whole before and after, and are refused where they would not."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from hydra_tune import train_plain
from hydra_tune.errors import BadLossError, TaskError
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.operators.operator_splitting import split_operators
from hydra_tune.task import TrainTask
from tests.parity.exact import differences, without_seconds
from tests.parity.optimizers import OPTIMIZERS, OTHERS

ROWS, WIDTH = 1024, 24
IDS = torch.randint(ROWS, (4, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Looks indices up, and says which is next; `tied` has one weight for both."""

    def __init__(self, *, tied: bool = False, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, **embedding)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def next_id(module: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def task(**changes: Any) -> TrainTask:
    """Six steps."""
    arguments: dict[str, Any] = {
        "model": Net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "train": lambda: [IDS, IDS.flip(0), IDS.flip(1)],
        "step": next_id,
        "epochs": 2,
        "seed": 3,
    }
    return TrainTask(**(arguments | changes))


def trained(**changes: Any) -> dict[str, Any]:
    plain = train_plain(task(**changes))
    return {
        "losses": plain.losses,
        "history": without_seconds(plain.history),
        "state": dict(plain.state_dict()),
        "optimizer": plain.optimizer_state_dict(),
    }


def cut(model: nn.Module, wanted: Any, groups: Any = None) -> tuple[Any, Any]:
    return split_operators(model, list(model.parameters()) if groups is None else groups, wanted)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# What is exact.


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("count", [2, 5, 24])
def test_training_an_embedding_by_columns_has_the_bits_of_training_it_whole(count, padding):
    model = partial(Net, padding_idx=padding, scale_grad_by_freq=padding is not None)
    of = partial(trained, model=model, train=lambda: [IDS % 9, IDS])  # some occur several times
    assert list(differences(of(), of(split_operators={"embed": count}))) == []


def test_training_a_linear_whose_input_needs_no_gradient_has_the_bits_of_training_it_whole():
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 4))

    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    of = partial(trained, model=model, train=lambda: [data], step=None, loss=functional.cross_entropy)
    assert list(differences(of(), of(split_operators={"0": 4}))) == []


@pytest.mark.parametrize("tied", [False, True])
def test_training_a_linear_in_pieces_is_as_close_as_rounding(tied):
    whole, pieces = (trained(model=partial(Net, tied=tied), split_operators=w) for w in (None, {"head": 3}))
    assert pieces["losses"][0] == whole["losses"][0], "the first forward has the same bits"
    assert pieces["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    for name, value in whole["state"].items():
        torch.testing.assert_close(pieces["state"][name], value, rtol=1e-4, atol=1e-5)
    assert pieces["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]


@pytest.mark.parametrize(("tied", "padding"), [(False, None), (True, None), (True, 0), (True, 450), (False, 450)])
def test_values_and_gradients(tied, padding):
    """Those of weights to the last bit, but for the sign of zeros; that of a Linear's input is a sum in another order."""
    whole, pieces = (built(partial(Net, tied=tied, padding_idx=padding)) for _ in range(2))
    cut(pieces, {"embed": 3, "head": 3})
    ids = torch.tensor([[0, 319, 320, 639], [640, 450, 1023, 0]])
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(2, 4, WIDTH), torch.randn(5, ROWS)
    inputs = []
    for model in (whole, pieces):
        leaf = x.clone().requires_grad_()
        found, logits = model.embed(ids), model.head(leaf)
        inputs.append((found.detach(), logits.detach(), leaf))
        ((found * weights[0]).sum() + (logits * weights[1]).sum()).backward()
    assert same_bits(inputs[0][0], inputs[1][0])
    assert same_bits(inputs[0][1], inputs[1][1])
    torch.testing.assert_close(inputs[0][2].grad, inputs[1][2].grad, rtol=1e-4, atol=1e-4)
    gradients = {name: parameter.grad for name, parameter in pieces.named_parameters()}
    for name in ("embed.weight", "head.weight", "head.bias"):
        if tied and name == "head.weight":
            continue
        dim = int(name == "embed.weight" and not tied)
        joined = torch.cat([gradients[f"{name}_{index}"] for index in range(3)], dim)
        assert torch.equal(joined, whole.get_parameter(name).grad), name


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_outside_the_vocabulary_is_refused_as_by_the_whole(index):
    for tied in (False, True):
        model = Net(tied=tied)
        cut(model, {"embed": 3})
        with pytest.raises(IndexError):
            model.embed(torch.tensor([5, index]))


# The model looks whole, before and after.


def test_the_model_draws_the_numbers_of_the_whole_one_and_is_its_own_class_again():
    of = partial(trained, optimizer=partial(torch.optim.SGD, lr=0.0))
    assert list(differences(of()["state"], of(split_operators={"head": 3, "embed": 2})["state"])) == []


def test_the_pieces_are_put_together_in_the_modules_and_parameters_that_were_there():
    model = Net(tied=True)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    operators, groups = cut(model, {"head": 3})
    assert [name for name, _ in model.named_parameters()] == [
        *("embed.weight_0", "embed.weight_1", "embed.weight_2", "middle.weight", "middle.bias"),
        *("head.bias_0", "head.bias_1", "head.bias_2"),
    ]
    assert dict(model.named_modules()) == modules
    assert isinstance(model.head, nn.Linear)
    assert "pieces=3" in repr(model.head)
    assert "pieces=3" in repr(model.embed)
    optimizer = torch.optim.Adam(groups)
    next_id(model, IDS).backward()
    optimizer.step()
    operators.restore(optimizer)
    assert dict(model.named_parameters(remove_duplicate=False)) == parameters
    assert model.head.weight is model.embed.weight is parameters["head.weight"]
    assert repr(model) == repr(Net())
    assert vars(model.head).keys() == vars(nn.Linear(1, 1)).keys()
    moved = {name: (tensor - expected[name]).abs().max() for name, tensor in model.state_dict().items()}
    assert all(0 < by <= 1.1e-3 for by in moved.values()), "a step of Adam"
    assert set(optimizer.state) == {parameter for _, parameter in model.named_parameters()}
    assert all(state["exp_avg"].shape == parameter.shape for parameter, state in optimizer.state.items())


GROUPS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda m: list(m.parameters()),
    "generator": lambda m: m.parameters(),
    "filter": lambda m: (p for name, p in m.named_parameters() if "bias" not in name),
    "by name": lambda m: [
        {"params": (p for name, p in m.named_parameters() if name == "head.weight"), "weight_decay": 0.5},
        {"params": [p for name, p in m.named_parameters() if name != "head.weight"], "betas": (0.8, 0.9)},
    ],
    "one parameter": lambda m: [{"params": m.head.weight}, {"params": (m.head.bias, m.embed.weight)}],
    "names": lambda m: list(m.named_parameters()),
    "groups of names": lambda m: [{"params": m.named_parameters(), "lr": 0.1}],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_pieces_are_where_the_whole_is_in_any_form_of_groups(kind):
    described = partial(trained, param_groups=GROUPS[kind], epochs=1)
    # Columns are exact, so a piece in a wrong group would show.
    expected, found = described()["optimizer"], described(split_operators={"embed": 3})["optimizer"]
    assert list(differences(expected, found)) == []
    assert described(split_operators={"head": 3})["optimizer"]["param_groups"] == expected["param_groups"]


def test_frozen_operators_stay_frozen():
    def model() -> nn.Module:
        made = Net()
        made.embed.requires_grad_(requires_grad=False)
        made.head.bias.requires_grad_(requires_grad=False)
        return made

    def middle(module: nn.Module) -> Any:
        return [p for p in module.parameters() if p.requires_grad]

    of = partial(trained, model=model, param_groups=middle)
    whole, pieces = of(), of(split_operators={"embed": 3, "head": 2})
    assert len(pieces["optimizer"]["state"]) == len(whole["optimizer"]["state"]) == 3
    for name in ("embed.weight", "head.bias"):
        assert same_bits(pieces["state"][name], whole["state"][name])
    assert pieces["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_one_module_in_two_places_and_modules_in_lists_of_their_own():
    def model() -> nn.Module:
        made = nn.Module()
        shared = nn.Linear(WIDTH, WIDTH)
        made.first, made.again, made.kept = shared, shared, [shared]
        return made

    def step(module: Any, x: Tensor) -> Tensor:
        return module.kept[0](module.again(module.first(x))).square().mean()

    of = partial(trained, model=model, train=lambda: [torch.ones(2, WIDTH)], step=step)
    whole, pieces = of(), of(split_operators={"again": 2})
    assert pieces["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert pieces["state"].keys() == whole["state"].keys()


def test_a_size_cuts_what_is_larger_into_as_few_pieces_as_are_not():
    model = Net()
    assert ROWS * WIDTH * 4 == 98304
    cut(model, "50000 B")
    assert model.embed.split_sizes == (12, 12)
    assert model.head.split_sizes == (320, 320, 384), "its bias counts, too"
    assert type(model.middle) is nn.Linear
    whole = Net()
    cut(whole, "1MiB")
    assert type(whole.head) is nn.Linear
    tied = Net(tied=True)
    cut(tied, "50000 B")
    assert tied.embed.split_sizes == tied.head.split_sizes == (320, 320, 384), "two would do for the embedding alone"


def test_long_pieces_are_multiples_of_64_rows():
    model = nn.Linear(2, 2000)
    cut(model, {"": 3})
    assert model.split_sizes == (640, 704, 656)


# What is refused.


class MyLinear(nn.Linear):
    pass


class Shares(Net):
    """Has the head's weight in a register of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized = self.head.weight


class SharesMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(self.head.weight.data)


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Net()
        change(made)
        return made

    return make


def own_class(model: Any) -> None:
    model.head = MyLinear(WIDTH, ROWS)


def own_forward(model: Any) -> None:
    model.head.forward = partial(nn.Linear.forward, model.head)


REFUSED = {
    "no such": (Net, {"haed": 2}, "split_operators names 'haed', which the model does not have; did you mean 'head'?"),
    "far from any": (
        Net,
        {"x": 2},
        "'x', which the model does not have; operators that can be cut: 'embed', 'middle', 'head'",
    ),
    "other class": (Net, {"": 2}, "names '', which is a Net; only nn.Linear and nn.Embedding can be cut"),
    "subclass": (changed(own_class), {"head": 2}, "'head', which is a MyLinear; only nn.Linear and nn.Embedding"),
    "parametrized": (
        changed(lambda m: parametrizations.weight_norm(m.head)),
        {"head": 2},
        "'head', which is a ParametrizedLinear; only",
    ),
    "pruned": (
        changed(lambda m: prune.random_unstructured(m.head, "weight", 0.5)),
        {"head": 2},
        "other parameters than",
    ),
    "hook": (changed(lambda m: m.head.register_forward_hook(print)), {"head": 2}, "cannot cut 'head', which has hooks"),
    "forward": (changed(own_forward), {"head": 2}, "cannot cut 'head', which has hooks, or a forward of its own"),
    "gradient hook": (
        changed(lambda m: m.head.weight.register_hook(print)),
        {"head": 2},
        "cannot cut 'head', which has a hook on the gradient of a parameter",
    ),
    "max_norm": (
        partial(Net, max_norm=1.0),
        {"embed": 2},
        "'embed', which renormalizes rows in its forward (max_norm)",
    ),
    "sparse": (partial(Net, sparse=True), {"embed": 2}, "'embed', which makes sparse gradients (sparse=True)"),
    "frequency, tied": (
        partial(Net, scale_grad_by_freq=True, tied=True),
        {"head": 2},
        "cannot cut 'embed', which is tied to a Linear and scales gradients",
    ),
    "tied to something else": (
        Shares,
        {"head": 2},
        "would cut 'penalized', which the Shares holds too, a Shares; only nn.Linear",
    ),
    "shared memory": (SharesMemory, {"head": 2}, "cannot cut 'head', which shares memory with another parameter"),
    "two numbers": (
        partial(Net, tied=True),
        {"head": 2, "embed": 3},
        "cuts 'embed' into 3 and 'head' into 2 pieces, which both hold 'embed.weight'; give them the same number",
    ),
    "too many": (
        Net,
        {"embed": 25},
        "cuts 'embed' into 25 pieces, but the operator has only 24 rows or columns",
    ),
    "too small": (Net, "2000 B", "is less than one of the 24 rows or columns of 'embed', 4.0 KiB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_the_model_is_left_as_it_was(case):
    make, wanted, message = REFUSED[case]
    model = built(make)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    with pytest.raises(TaskError) as caught:
        cut(model, wanted)
    assert message in str(caught.value)
    for name, tensor in model.named_parameters():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_a_size_leaves_classes_made_of_a_linear_alone():
    model = changed(own_class)()
    cut(model, "50000 B")
    assert type(model.head) is MyLinear


def test_a_step_that_reads_a_weight_is_refused():
    def decayed(module: Any, ids: Tensor) -> Tensor:
        return next_id(module, ids) + module.head.weight.square().sum()

    with pytest.raises(
        TaskError, match="the step reads 'weight' of 'head', which split_operators has cut into 3 pieces"
    ):
        trained(step=decayed, split_operators={"head": 3})


def test_a_step_that_has_kept_a_weight_does_not_train_without_it():
    kept: list[Tensor] = []

    def model() -> nn.Module:
        made = Net()
        kept[:] = [made.head.weight]
        return made

    def decayed(module: nn.Module, ids: Tensor) -> Tensor:
        return next_id(module, ids) + kept[0].square().sum()

    with pytest.raises(BadLossError):
        trained(model=model, step=decayed, split_operators={"head": 3})


class Lamb(torch.optim.SGD):
    """Steps as long as the whole tensor is, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / p.grad.norm()))


PER_TENSOR = {"adafactor", "muon"}


@pytest.mark.parametrize("name", OPTIMIZERS | OTHERS)
def test_which_optimizers_train_in_pieces(name):
    model = nn.Sequential(nn.Linear(WIDTH, 512, bias=name != "muon"))
    operators, groups = cut(model, {"0": 2})
    optimizer = (OPTIMIZERS | OTHERS)[name](groups)
    if name not in PER_TENSOR:
        operators.check(optimizer)
        return
    with pytest.raises(
        TaskError, match=r"does not update each element by itself, so training '0\.weight' in the pieces"
    ):
        operators.check(optimizer)
    assert type(model[0]) is nn.Linear, "the model is whole again"
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_an_optimizer_of_the_users_own_is_tried(rate):
    with pytest.raises(TaskError, match="Lamb does not update each element by itself"):
        trained(optimizer=partial(Lamb, lr=rate), split_operators={"embed": 2})


def test_an_optimizer_that_takes_its_parameters_from_elsewhere_is_refused():
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [Net()]
        made.append(list(made[0].parameters()))
        return made[0]

    def whole(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(made[1], lr=0.1)

    def parted(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": groups[:1]}, {"params": groups[1:]}], lr=0.1)

    with pytest.raises(TaskError, match=r"the optimizer holds the whole 'embed.weight', which split_operators has cut"):
        trained(model=model, optimizer=whole, split_operators={"embed": 2})
    with pytest.raises(TaskError, match=r"puts the pieces of 'embed.weight' into different groups"):
        trained(model=model, optimizer=parted, split_operators={"embed": 2})
