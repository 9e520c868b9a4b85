"""Steps per second of N models stacked, one after the other, and in processes side by side, on a GPU.

    python benchmarks/gpu_fusion.py --out runs/gpu_fusion                       # 1 to 64 of a CNN, a ViT and a BERT-like model
    python benchmarks/gpu_fusion.py --device cpu --quick --out /tmp/rehearsal tiny  # to see that it runs

Needs torch, numpy, psutil and networkx, no installation, and less than 8 minutes: what there is no time for any more is left
out, and the table says so. Every member has its own weights and batch, and AdamW of its own rate. `stacked` is what the units
of a group compute: the traced forward and backward, and the optimizer; `graphed` is the same with forward and backward recorded
as a CUDA graph, as `fusion_compile="cudagraphs"` has it, with the copies of the batch and of the gradients that it makes. Of N
models one after the other each step takes as long as one alone, so that is measured once. Of processes there are as many as
members, all at work at the same time, each with a context of its own on the GPU. Seconds are by the clock, with the device idle
before and after. The table is written after every row, as Markdown and as JSON.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing has to be installed

import torch
from gpu_models import MODELS, batch, one_step, rate
from side_by_side import NoRoomError, Processes, TooSlowError
from torch.nn import functional
from torch.optim import AdamW

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.cuda_graphs import CudaRecorder
from hydra_tune.fusion.compile.batched_plan import trace_step
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.stacked_state import StackedModule, stacked_optimizer
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary

COUNTS = (1, 2, 4, 8, 16, 32, 64)
ON_GPU = ("cnn", "vit", "bert")
HEADS = ("model", "members", "one by one", "processes", "stacked", "graphed", "stacked / one by one",
         "graphed / one by one", "stacked / processes")  # fmt: skip
SECONDS, LIMIT_MINUTES = (
    1.2,
    7.3,
)  # of a measurement; of all, with something left for the last one and for the processes' end
FIRST_ROW_SECONDS, GROWTH = (
    20.0,
    1.6,
)  # what a first row may take, and a row of twice as many members over the one before


@dataclass
class Row:
    """Steps of one model per second, of all members together; None where not measured, with the reason in `missing`."""

    model: str
    members: int
    one_by_one: float | None = None
    processes: float | None = None
    stacked: float | None = None
    graphed: float | None = None

    def cells(self):
        """As of `HEADS`."""
        numbers = [_text(one) for one in (self.one_by_one, self.processes, self.stacked, self.graphed)]
        ratios = [
            _ratio(self.stacked, self.one_by_one),
            _ratio(self.graphed, self.one_by_one),
            _ratio(self.stacked, self.processes),
        ]
        return [self.model, str(self.members), *numbers, *ratios]

    def say(self):
        """In a line for programs; one of the same `id` that comes later is meant instead."""
        named = {"id": f"{self.model} {self.members}"} | dict(zip(HEADS, self.cells(), strict=True))
        print("row: " + json.dumps(named), flush=True)


class Clock:
    """The time that is left, and what rows are expected to take."""

    def __init__(self, minutes):
        self._end = time.monotonic() + 60 * minutes
        self._took = {}

    @property
    def left(self):
        """Seconds."""
        return self._end - time.monotonic()

    def has_time_for(self, kind):
        """Whether another measurement of a kind is to be begun, by what the last one took."""
        return GROWTH * self._took.get(kind, FIRST_ROW_SECONDS / GROWTH) < self.left

    def timed(self, kind, action):
        """Do it, and note what it takes."""
        begun = time.monotonic()
        try:
            return action()
        finally:
            self._took[kind] = time.monotonic() - begun


class Stack:
    """So many models as one."""

    def __init__(self, name, count, device):
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        host = CpuDevice(0, 1 << 33)
        library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 33, buffer_fraction=0.0, alignment=host.alignment))
        x, y = batch(name, "cpu")
        arguments = {"model": MODELS[name][0], "train": lambda: [(x, y)], "loss": functional.cross_entropy}
        rates = [partial(AdamW, lr=1e-4 / (index + 1)) for index in range(count)]
        members = [MemberTrial(TrainTask(**arguments, optimizer=o, seed=i), library, host) for i, o in enumerate(rates)]
        built = [member.built() for member in members]
        plans = GroupPlanFactory(library)
        with members[0].peek() as first_batches:
            wanted = first_batches["train"]
        plan = plans.stacked(plans.of_member(members[0], wanted), count).plan
        host.close()
        module = StackedModule([own for own, _ in built])
        inputs = [torch.stack([tensor] * count) for tensor in wanted.leaves.tensors]
        (shard,) = plan.shards
        names = shard.graph.state
        own = _state(module)
        assert trace_step(plan, [own[n] for n in names], inputs, count, place=self._device), "it is traced"
        self._trace = plan.computing.traces[shard.graph.first]
        module = module.to(self._device)
        self._optimizer = stacked_optimizer([one for _, one in built], built[0][0], module)
        self._state = _state(module)
        self._given = [
            *(plan.constants[n].to(self._device) for n in shard.graph.constants),
            *(inputs[index].to(self._device) for index in shard.graph.inputs),
        ]
        self._num_constants = len(shard.graph.constants)
        self._names = names

    def step(self):
        """One of all, as a group's unit makes it."""
        self._update(self._trace.run(self._operands(self._given)).parameters.values())

    def graphed(self, recorder):
        """A function that makes such a step, forward and backward recorded."""
        read = [tensor.clone() for tensor in self._given]
        recording = recorder.record(lambda: self._gradients(read))

        def step():
            for target, source in zip(read, self._given, strict=True):
                target.copy_(source)
            recording.replay()
            made = [torch.empty_like(tensor) for tensor in recording.outputs]
            torch._foreach_copy_(made, list(recording.outputs))
            self._update(made)

        return step, recording.drop

    def _gradients(self, given):
        return list(self._trace.run(self._operands(given)).parameters.values())

    def _operands(self, given):
        first = self._num_constants
        state = [self._state[name] for name in self._names]
        return ShardOperands(state=state, constants=given[:first], inputs=given[first:], live_in=())

    def _update(self, gradients):
        for name, gradient in zip(self._trace.trained, gradients, strict=True):
            self._state[name].grad = gradient
        self._optimizer.step()


def _state(module):
    return dict(module.named_parameters()) | dict(module.named_buffers())


class Table:
    """The rows so far, and what is missing of them.

    Args:
        out: folder that it is written to; None: it is only printed.
        about: the device, torch.
    """

    def __init__(self, out, about):
        self._out, self._about = out, about
        self.rows, self.missing, self.has_failures = [], [], False

    def row(self, name, count):
        """That of so many models."""
        found = next((row for row in self.rows if (row.model, row.members) == (name, count)), None)
        if found is None:
            found = Row(name, count)
            self.rows.append(found)
        return found

    def lacks(self, what, why, error=None):
        """Say that something has not been measured, and where it has failed."""
        if error is not None:
            self.has_failures = True
            traceback.print_exception(error)
        self.missing.append(f"{what}: {why}")
        print(f"not measured: {what}: {why}", flush=True)

    def write(self):
        """What there is."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        found = {**self._about, "rows": [asdict(row) for row in self.rows], "missing": self.missing}
        (self._out / "gpu_fusion.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (self._out / "gpu_fusion.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self):
        """The table for a page of documentation."""
        told = ", ".join(f"{key}: {value}" for key, value in self._about.items())
        lines = [f"Steps of one model per second; {told}.", "", _line(HEADS), "|" + "---|" * len(HEADS)]
        lines += [_line(row.cells()) for row in self.rows]
        lines += ["", *(f"* not measured: {one}" for one in self.missing)] if self.missing else []
        return "\n".join(lines) + "\n"


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _text(found):
    return "-" if found is None else f"{found:.4g}"


def _ratio(over, under):
    return "-" if over is None or under is None else f"{over / under:.2f}x"


def stack_row(row, device, seconds, recorder, table):
    """Measure one row's stacked steps."""
    stack = Stack(row.model, row.members, device)
    row.stacked = rate(stack.step, device, seconds) * row.members
    if recorder is not None:
        try:
            step, drop = stack.graphed(recorder)
        except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
            table.lacks(f"{row.model}, {row.members} graphed", first_line(error), error)
            return
        row.graphed = rate(step, device, seconds) * row.members
        drop()


def stacked_rows(table, options, clock, recorder):
    """All models, those of few members first."""
    for count in options.counts:
        for name in options.models:
            row = table.row(name, count)
            if not clock.has_time_for("stacked"):
                table.lacks(f"{name}, {count} stacked", "no time was left")
                continue
            try:
                first = next((one.one_by_one for one in table.rows if one.model == name and one.one_by_one), None)
                row.one_by_one = first or rate(one_step(name, options.device), options.device, options.seconds)
                clock.timed("stacked", partial(stack_row, row, options.device, options.seconds, recorder, table))
            except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                table.lacks(f"{name}, {count} stacked", first_line(error), error)
            gc.collect()
            table.write()
            row.say()


def process_rows(table, options, clock):
    """All models, in as many processes as members."""
    processes = Processes(options.device, options.seconds)
    too_many = None
    try:
        for count in options.counts:
            for name in options.models:
                what = f"{name}, {count} processes"
                # A row is mostly the start of its processes, where there are more of them than before.
                kind = "start" if count > len(processes) else "processes"
                if too_many is None and not clock.has_time_for(kind):
                    too_many = "no time was left"
                if too_many is not None:
                    table.lacks(what, too_many)
                    continue
                try:
                    measure = partial(processes.rate, name, count, clock.left)
                    table.row(name, count).processes = clock.timed(kind, measure)
                    table.row(name, count).say()
                except (NoRoomError, TooSlowError, RuntimeError) as error:
                    table.lacks(what, str(error))
                    too_many = "fewer have failed before"
                table.write()
    finally:
        processes.close()


def first_line(error):
    """What an error is, and says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def asked(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="of " + ", ".join(MODELS) + "; left out: " + ", ".join(ON_GPU))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--counts", nargs="+", type=int, help="members: " + " ".join(map(str, COUNTS)))
    parser.add_argument("--out", type=Path, help="folder for gpu_fusion.md and gpu_fusion.json")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="nothing is begun that may outlast these")
    parser.add_argument("--quick", action="store_true", help="1 and 2 members, a few steps each, to see that it runs")
    options = parser.parse_args(arguments)
    options.models = options.models or list(ON_GPU)
    options.counts = options.counts or ([1, 2] if options.quick else list(COUNTS))
    options.seconds = 0.05 if options.quick else SECONDS
    return options


def main(arguments=None, recorder=None):
    """Measure everything.

    Args:
        arguments: of the command line.
        recorder: of steps; on a GPU that of the pool, unless given.
    """
    options = asked(arguments)
    clock = Clock(options.minutes)
    torch.set_num_threads(1)
    is_gpu = torch.device(options.device).type == "cuda"
    recorder = CudaRecorder() if recorder is None and is_gpu else recorder
    on = torch.cuda.get_device_name(options.device) if is_gpu else "cpu"
    table = Table(options.out, {"device": on, "torch": torch.__version__, "seconds of a measurement": options.seconds})
    begun = time.monotonic()
    stacked_rows(table, options, clock, recorder)
    if is_gpu:
        torch.cuda.empty_cache()  # for the processes
    process_rows(table, options, clock)
    table.write()
    print(table.markdown(), flush=True)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return table


if __name__ == "__main__":
    sys.exit(main().has_failures)
