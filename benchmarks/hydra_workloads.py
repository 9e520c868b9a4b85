"""HYDRA's Table 2, trained: both workloads, shrunk, on two CPU devices, beside other ways to train them.

    python benchmarks/hydra_workloads.py --text wiki.test.tokens --steps 50   # on two idle cores; not run at full size yet
    python benchmarks/hydra_workloads.py --quick --steps 1                    # some minutes, tiny models
    python benchmarks/hydra_workloads.py --device cuda --steps 50             # on one GPU: the ways that need no second one

A trial of a few steps is mostly its capture, so take steps enough.

The twelve trials of each workload are the paper's (`examples/paper`), smaller in depth and width alone: BERT over batches of
8, 16 and 32 and four learning rates, ViT over six depths and batches of 64 and 128. Each trial takes a few steps. Without
`--text`, words are made up; images always are, as only times are compared. The vocabulary has 1,024 words.

    plain              one trial after the other, a loop that anyone would write, on one core
    task parallel      two such loops at once
    model parallel     a trial over two processes (torch.distributed.pipelining over gloo), one batch at a time
    GPipe              the same with 8 microbatches
    FSDP2              a trial over two processes, parameters sharded, half of the batch each
    hydra-tune         all trials in a pool of "cpu:2"
    hydra-tune, link   the same with copies as slow, beside arithmetic, as the paper's

Only the pool is held to a device's memory: 11 GB for 16 bytes of each parameter of the paper's largest model, in proportion.
The plain loops have all of the host's memory. A process of the others has half of each model, and gloo's copies are as fast
as the host's memory. Each process has one thread. All times are of the wall clock, from the first model that is built to the
last step; imports and the start of processes do not count. The pool's final weights must have the bits of the plain loop's.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, Subset

PAPER = Path(__file__).parents[1] / "examples" / "paper"
sys.path.insert(0, str(PAPER))

ARMS = ("plain", "task parallel", "model parallel", "GPipe", "FSDP2", "hydra-tune", "hydra-tune, link")
LIMITED = ("hydra-tune", "hydra-tune, link")
ON_ONE_GPU = ("plain", "task parallel", "hydra-tune")
MICROBATCHES = {"model parallel": 1, "GPipe": 8}
PROCESSES = 2
DEVICE_BYTES_OF_PARAMETER = {"bert": 11 / 1, "vit": 11 / 2}  # 11 GB, and models of 1 and of 2 billion parameters
BYTES_OF_FLOP = 12e9 / 5.67e12  # a link's, beside the arithmetic that a GPU attains (docs/results/simulation.md)
QUICK_MEMORY = "6MB"  # of each device, for tiny models
DEPTHS = (24, 48, 64, 79, 119, 159)  # of the paper's ViTs, as far as sizes follow from depth


class MadeUp(Dataset):
    """Samples of random inputs and labels, the same each time."""

    def __init__(self, kind, count, tokens, vocabulary):
        generator = torch.Generator().manual_seed(0)
        if kind == "vit":
            self.inputs = torch.randn(count, 3, 32, 32, generator=generator)
            self.labels = torch.randint(10, (count,), generator=generator)
        else:
            self.inputs = torch.randint(vocabulary, (count, tokens), generator=generator)
            asked = torch.rand(count, tokens, generator=generator) < 0.15
            self.labels = torch.where(asked, self.inputs, -100)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


def trials(workload, text, steps, *, quick):
    """The tasks of a workload, with as many samples as the steps take."""
    import bert  # noqa: PLC0415 - of the example's folder
    import vit  # noqa: PLC0415

    if workload == "bert":
        width, layers, vocabulary, tokens = (32, 2, 64, 16) if quick else (256, 12, 1024, 128)
        sizes = {"width": width, "layers": layers, "heads": 4, "tokens": tokens, "vocabulary": vocabulary}
        found = [
            bert.build(batch_size=batch, lr=rate, data=text, seed=number, **sizes)
            for number, (batch, rate) in enumerate((b, r) for b in (8, 16, 32) for r in (1e-3, 1e-4, 1e-5, 1e-6))
        ]
    else:
        width, shorter, tokens, vocabulary = (32, 24, 0, 0) if quick else (192, 8, 0, 0)
        found = [
            vit.build(batch_size=batch, layers=depth // shorter, width=width, heads=4, seed=number)
            for number, (depth, batch) in enumerate((d, b) for d in DEPTHS for b in (64, 128))
        ]
    return [
        replace(
            task,
            train=data_of(task, workload, text, steps * task.batch_size, tokens, vocabulary),
            validate=None,
            evaluate=None,
            metric="train_loss",
            epochs=1,
        )
        for task in found
    ]


def data_of(task, workload, text, count, tokens, vocabulary):
    if workload == "vit" or text is None:
        return MadeUp(workload, count, tokens, vocabulary)
    if len(task.train) < count:
        raise SystemExit(f"{text} has {len(task.train)} sequences, and a trial takes {count}; give a longer text")
    return Subset(task.train, range(count))


def begun(task, device="cpu"):
    """A trial's model, optimizer and batches, as a plain loop makes them."""
    torch.manual_seed(task.seed)
    module = task.model().to(device)
    return module, task.optimizer(module.parameters()), DataLoader(task.train, task.batch_size, shuffle=True)


def digest(state):
    content = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        content.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


# The arms: each returns the digests of the weights that it can compare, by the trial's number.


def plain(tasks, device, turns=None):
    """One trial after the other; of several such loops, each takes the next trial that nobody has taken."""
    bits = {}
    for number, task in enumerate(tasks):
        if turns is not None and not taken(turns, number):
            continue
        module, optimizer, loader = begun(task, device)
        for inputs, labels in loader:
            task.loss(module(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        bits[number] = digest(module.state_dict())
    return bits


def taken(turns, number):
    try:
        (turns / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Stage(nn.Module):
    """One process's part of a model, as a pipeline's stage."""

    def __init__(self, module, rank):
        super().__init__()
        half = len(module.blocks) // 2
        self.first = getattr(module, "embeddings", None) or getattr(module, "patches", None)
        self.blocks = module.blocks[:half] if rank == 0 else module.blocks[half:]
        self.is_first, self.is_bert = rank == 0, hasattr(module, "embeddings")
        if rank == 0:
            self.last = nn.Identity()
        else:
            self.first = nn.Identity()
            self.last = nn.Sequential(module.transform, module.predict) if self.is_bert else module.norm
            self.head = None if self.is_bert else module.head

    def forward(self, values):
        """Of words or images on the first process, else of what the first one has computed."""
        values = self.last(self.blocks(self.first(values)))
        return values if self.is_first or self.is_bert else self.head(values[:, 0])

    @property
    def shared(self):
        """The matrix that BERT's head and its embeddings share, each process with a copy."""
        if not self.is_bert:
            return None
        return self.first.words.weight if self.is_first else self.last[1].weight


def pipelined(tasks, rank, microbatches):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # noqa: PLC0415

    for task in tasks:
        module, _, loader = begun(task)
        part = Stage(module, rank)
        optimizer = task.optimizer(part.parameters())
        stage = PipelineStage(part, rank, PROCESSES, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, min(microbatches, task.batch_size), loss_fn=task.loss)
        for inputs, labels in loader:
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=labels, losses=[])
            if part.shared is not None:
                distributed.all_reduce(part.shared.grad)
            optimizer.step()
            optimizer.zero_grad()


def sharded(tasks, rank):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for task in tasks:
        module, _, loader = begun(task)
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        optimizer = task.optimizer(module.parameters())
        for inputs, labels in loader:
            task.loss(module(inputs.chunk(PROCESSES)[rank]), labels.chunk(PROCESSES)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()


def pooled(tasks, workload, link, devices, *, quick):
    from hydra_tune import HydraExecutor  # noqa: PLC0415

    with torch.device("meta"):
        largest = max(sum(p.numel() for p in task.model().parameters()) for task in tasks)
    # Activations of a tiny model are larger beside its parameters.
    budget = QUICK_MEMORY if quick else int(DEVICE_BYTES_OF_PARAMETER[workload] * largest)
    with HydraExecutor(devices, device_memory=budget, link_bandwidth=link, max_concurrent=len(tasks)) as pool:
        results = pool.run(tasks)
        return {number: digest(result.state_dict()) for number, result in enumerate(results)}


def work(arguments):
    """One process of an arm; the first one prints the figures."""
    torch.set_num_threads(1)
    arm, rank = arguments.arm, arguments.rank
    tasks = trials(arguments.workload, arguments.text, arguments.steps, quick=arguments.quick)
    is_alone = arm in ("plain", *LIMITED)
    if not is_alone:
        distributed.init_process_group(
            "gloo", init_method=f"file://{arguments.meeting}/file", rank=rank, world_size=PROCESSES
        )
        distributed.barrier()
    began, bits = time.monotonic(), {}
    if arm == "plain":
        bits = plain(tasks, arguments.device)
    elif arm == "task parallel":
        bits = plain(tasks, arguments.device, Path(arguments.meeting))
    elif arm in MICROBATCHES:
        pipelined(tasks, rank, MICROBATCHES[arm])
    elif arm == "FSDP2":
        sharded(tasks, rank)
    else:
        devices = "cpu:2" if arguments.device == "cpu" else arguments.device
        bits = pooled(tasks, arguments.workload, arguments.link, devices, quick=arguments.quick)
    if not is_alone:
        distributed.barrier()
    print("FIGURES", json.dumps({"seconds": time.monotonic() - began, "bits": bits}))
    if not is_alone:
        distributed.destroy_process_group()


# The table.


def run(arm, workload, arguments, link):
    """Seconds of an arm, and digests of the weights that it has given."""
    count = 1 if arm in ("plain", *LIMITED) else PROCESSES
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, "--arm", arm, "--workload", workload, "--steps", str(arguments.steps)]
        command += ["--device", arguments.device]
        command += ["--meeting", meeting] + ["--quick"] * arguments.quick
        command += [] if arguments.text is None else ["--text", arguments.text]
        command += [] if link is None or arm != "hydra-tune, link" else ["--link", str(link)]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=-1, stderr=-1, text=True) for rank in range(count)
        ]
        answers = [process.communicate() for process in started]
    figures = []
    for process, (out, complaint) in zip(started, answers, strict=True):
        line = next((line for line in out.splitlines() if line.startswith("FIGURES ")), None)
        if process.returncode or line is None:
            raise SystemExit(f"{workload}, {arm}, failed:\n{out}{complaint[-3000:]}")
        figures.append(json.loads(line.removeprefix("FIGURES ")))
    bits = {number: value for found in figures for number, value in found["bits"].items()}
    return figures[0]["seconds"], bits


def flops(tasks):
    """Of all steps of all trials, by six for each parameter and token."""
    total = 0
    with torch.device("meta"):
        for task in tasks:
            sample = task.train[0][0]
            tokens = len(sample) if sample.dim() == 1 else 17
            total += 6 * sum(p.numel() for p in task.model().parameters()) * tokens * len(task.train)
    return total


def table(workload, arguments):
    total = flops(trials(workload, arguments.text, arguments.steps, quick=arguments.quick))
    seconds, link = {arm: [] for arm in arguments.arms}, None
    for number in range(arguments.rounds):
        bits = {}
        # The plain loop goes first in the first round, as the link's speed follows from its arithmetic.
        for arm in arguments.arms if number % 2 == 0 else arguments.arms[::-1]:
            taken_seconds, bits[arm] = run(arm, workload, arguments, link)
            seconds[arm].append(taken_seconds)
            if arm == "plain" and link is None:
                link = int(BYTES_OF_FLOP * total / taken_seconds)
        for arm in ("task parallel", *LIMITED):
            if "plain" in bits and bits.get(arm, bits["plain"]) != bits["plain"]:
                raise SystemExit(f"{workload}, {arm}: other final weights than the plain loop's")
    first = "model parallel" if "model parallel" in seconds else next(iter(seconds))
    base = statistics.median(seconds[first])
    print(f"\n{workload}: {arguments.steps} steps of each of 12 trials, {total / 1e9:.0f} GFLOP; link {link} bytes/s\n")
    print(f"| | seconds | over {first} | a device's memory |\n|---|---|---|---|")
    for arm in arguments.arms:
        middle = statistics.median(seconds[arm])
        limit = QUICK_MEMORY if arguments.quick else "in the paper's proportion"
        memory = limit if arm in LIMITED else "not limited"
        print(f"| {arm} | {middle:.1f} | {base / middle:.2f}x | {memory} |", flush=True)
        if arguments.device == "cuda":  # for `gpu.py`
            row = {
                "workload": workload,
                "arm": arm,
                "seconds": round(middle, 2),
                f"over {first}": round(base / middle, 2),
            }
            print("row: " + json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a file of WikiText-2; without it, words are made up")
    parser.add_argument("--workloads", default="bert,vit", type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cpu: two CPU devices; cuda: one GPU")
    parser.add_argument("--arms", type=lambda text: text.split(";"), help="some, with ; between")
    parser.add_argument("--steps", type=int, default=4, help="of each trial")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny models")
    # Of a process of an arm.
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--link", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        work(arguments)
        return
    arguments.arms = arguments.arms or list(ARMS if arguments.device == "cpu" else ON_ONE_GPU)
    if arguments.device == "cuda" and not set(arguments.arms) <= set(ON_ONE_GPU):
        raise SystemExit(f"one GPU serves {', '.join(ON_ONE_GPU)}")
    for workload in arguments.workloads:
        table(workload, arguments)


if __name__ == "__main__":
    main()
