"""CPU seconds of a step of N models one after the other, and of the same step stacked; ratios within one run.

    python benchmarks/fusion.py [--compile inductor] [--precision float32,bfloat16] [mlp] [cnn] [transformer] [bert] [wide]

One intra-op thread. The stacked step is what the units of a group compute: the traced forward and backward, and the optimizer.
What members do for themselves (drawing batches, schedules, reports) is in neither.
"""

import argparse
import time
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.stacked_state import StackedModule, stacked_optimizer
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.state.model_state import ModelState

ROUNDS, STEPS = 7, 10


class Transformer(nn.Module):
    """Two layers of width 32 on 16 tokens."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        """Class scores."""
        return self.head(self.layers(self.embedding(ids)).mean(1))


class Bert(nn.Module):
    """A BERT of two layers of width 64, from the transformers library."""

    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - the other models do without

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=10, **sizes))

    def forward(self, ids):
        """Class scores."""
        return self.bert(input_ids=ids).logits


def wide():
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn():
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, 10))


CASES = {
    "mlp": (mlp, 16, lambda: torch.randn(32, 64)),
    "cnn": (cnn, 8, lambda: torch.randn(32, 1, 8, 8)),
    "transformer": (Transformer, 8, lambda: torch.randint(64, (8, 16))),
    "bert": (Bert, 8, lambda: torch.randint(64, (8, 16))),
    "wide": (wide, 8, lambda: torch.randn(64, 256)),
}


def milliseconds(run):
    """The least CPU time of a run, of several rounds."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(STEPS):
            run()
        best = min(best, (time.process_time() - start) / STEPS)
    return best * 1e3


def sequential(build, optimizer, count, x, y, *, precision="float32"):
    models = [build() for _ in range(count)]
    optimizers = [optimizer(model.parameters()) for model in models]

    def run():
        for model, one in zip(models, optimizers, strict=True):
            with nullcontext() if precision == "float32" else torch.autocast("cpu", getattr(torch, precision)):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            one.step()
            one.zero_grad()
            loss.item()

    return run


def stacked(build, optimizer, count, x, y, *, backend=None, precision="float32"):
    """The step of a group, and the seconds it takes to trace it."""
    device = CpuDevice(0, 1 << 33)
    library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 33, buffer_fraction=0.0, alignment=device.alignment))
    arguments = {"model": build, "optimizer": optimizer, "train": lambda: [(x, y)], "loss": functional.cross_entropy}
    tasks = [TrainTask(**arguments, seed=seed, precision=precision) for seed in range(count)]
    members = [MemberTrial(task, library, device) for task in tasks]
    built = [member.built() for member in members]
    plans = GroupPlanFactory(library, backend)
    with members[0].peek() as first_batches:
        wanted = first_batches["train"]
    plan = plans.stacked(plans.of_member(members[0], wanted), count)
    module = StackedModule([module for module, _ in built])
    stepped = stacked_optimizer([one for _, one in built], built[0][0], module)
    held = ModelState(module, stepped, plan.plan, device)
    state = held.tensors
    inputs = tuple(torch.stack([tensor] * count) for tensor in wanted.leaves.tensors)
    start = time.perf_counter() if backend else time.process_time()  # compilers work in processes of their own
    plans.trace(plan, state, inputs, count)
    seconds = (time.perf_counter() if backend else time.process_time()) - start
    graph = plan.plan.shards[0].graph
    trace = plan.plan.computing.traces[graph.first]
    operands = ShardOperands(
        state=[state[name] for name in graph.state],
        constants=[plan.plan.constants[name] for name in graph.constants],
        inputs=[inputs[index] for index in graph.inputs],
        live_in=(),
    )

    lease = Pager(device).lease((), 0)  # these optimizers create their state once, so the lease loses no block

    def run(held=held):  # whose blocks the parameters lie in
        made = trace.run(operands, is_laid_out=True)
        for name, gradient in made.parameters.items():
            state[name].grad = gradient
        stepped.step()
        held.adopt_optimizer_state(plan.plan.shards[0].trained, device, lease)
        made.outputs[trace.loss].tolist()

    return run, seconds


def main():
    torch.set_num_threads(1)
    print("model        N  optimizer precision  one after the other  stacked  ratio  tracing")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; all unless given")
    parser.add_argument(
        "--compile", metavar="BACKEND", help="of torch.compile; what tracing and compiling take is wall time then"
    )
    parser.add_argument("--precision", default="float32", help="float32 or bfloat16, or both with a comma between")
    options = parser.parse_args()
    for name in options.models or CASES:
        build, count, inputs = CASES[name]
        x = inputs()
        y = torch.randint(10, (len(x),))
        optimizers = {"SGD": partial(SGD, lr=1e-3, momentum=0.9), "AdamW": partial(AdamW, lr=1e-3)}
        for (kind, optimizer), precision in product(optimizers.items(), options.precision.split(",")):
            before = milliseconds(sequential(build, optimizer, count, x, y, precision=precision))
            run, seconds = stacked(build, optimizer, count, x, y, backend=options.compile, precision=precision)
            after = milliseconds(run)
            print(
                f"{name:12} {count:2} {kind:9} {precision:8} {before:16.2f} ms {after:8.2f} ms {before / after:5.1f}x "
                f"{seconds:6.2f} s"
            )


if __name__ == "__main__":
    main()
