"""The arms of `common_case.py`, each run in a process of its own.

    python benchmarks/common_case_arms.py ROW ARM TRIALS STEPS BEGAN DEVICE

`BEGAN` is the clock's reading when the process was asked for; `DEVICE` is "cpu" or "cuda". The last line that it prints
has the figures as JSON. On a GPU both arms use torch's deterministic kernels, so that their bits can be compared.
"""

# ruff: noqa: D101, D102 - models as anyone writes them

import hashlib
import importlib
import json
import os
import random
import resource
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

EPOCH_STEPS = 50
LAZY = "BertForSequenceClassification", "LlamaForCausalLM"  # imported when they are asked for

# The programs. Each gives what both arms train: a model, a rate, batches anew for each pass, a loss of a batch.


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def mlp(width, depth=5, inputs=64):
    layers = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.calls = mlp(64), 0

    def forward(self, inputs):
        self.calls += 1
        return self.layers(inputs) * (1 + 0.01 * (self.calls % 7))


def cnn(channels=8):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixes, self.joins = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widens, self.narrows = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        batch, steps, width = hidden.shape
        query, key, value = self.mixes(self.before(hidden)).view(batch, steps, 3, 10, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.joins(mixed.transpose(1, 2).reshape(batch, steps, width))
        return hidden + self.narrows(functional.gelu(self.widens(self.between(hidden))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=8192, width=640, layers=9, length=256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, inputs):
        return self.head(
            self.blocks(self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device)))
        )


class LoRA(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.05)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.base(inputs) + 2.0 * self.up(self.down(self.drop(inputs)))


def bert():
    import transformers  # noqa: PLC0415

    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=4))


def llama():
    """Its projections of queries and values have trained matrices of rank 8 beside them; nothing else is trained."""
    import transformers  # noqa: PLC0415

    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


def vectors(batch=32, inputs=64, count=EPOCH_STEPS):
    stream = seeded(1)
    return [
        (torch.randn(batch, inputs, generator=stream), torch.randint(10, (batch,), generator=stream))
        for _ in range(count)
    ]


def pictures(batch=16, side=16):
    stream = seeded(1)
    return [
        (torch.randn(batch, 3, side, side, generator=stream), torch.randint(10, (batch,), generator=stream))
        for _ in range(EPOCH_STEPS)
    ]


def tokens(vocabulary, batch=4, length=256, count=6):
    stream = seeded(1)
    return [torch.randint(vocabulary, (batch, length), generator=stream) for _ in range(count)]


class Rows(Dataset):
    """A map-style dataset of samples in memory, as anyone writes one."""

    def __init__(self):
        self.inputs, self.labels = (torch.cat(part) for part in zip(*vectors(), strict=True))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Augmented(Dataset):
    """A map-style dataset whose samples are flipped, shifted and noisy, by all three random streams."""

    def __init__(self, count):
        stream = seeded(1)
        self.pictures = torch.rand(count, 3, 32, 32, generator=stream)
        self.labels = torch.randint(10, (count,), generator=stream)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index]
        if random.random() < 0.5:
            picture = picture.flip(2)
        picture = picture.roll(int(np.random.randint(-4, 5)), 1)  # noqa: NPY002 - the stream that users draw from
        return picture + 0.05 * torch.randn(3, 32, 32), self.labels[index]


def classified(module, batch):
    return functional.cross_entropy(module(batch[0]), batch[1])


def predicted(module, batch):
    return functional.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def answered(module, batch):
    return module(input_ids=batch, labels=batch[:, 0] % 4).loss


def continued(module, batch):
    return module(input_ids=batch, labels=batch).loss


def program(row, steps):
    """Model, loss of a batch, handle of the data, passes: the same for both arms, but made by each in its own process."""
    if row.startswith("loader"):
        epochs = 10 if steps > 1000 else 4
        loader = DataLoader(Augmented(16 * steps // epochs), 16, shuffle=True, num_workers=int(row[-1]))
        return (lambda: cnn(16)), classified, loader, epochs
    if row.startswith("fused"):
        batches, rows = vectors(), Rows()
        data = {
            "fused_list": lambda: batches,
            "fused_dataset": TensorDataset(rows.inputs, rows.labels),
            "fused_loader": DataLoader(rows, 32, shuffle=True),
        }[row.removesuffix("_again")]
        return (lambda: mlp(64)), classified, data, max(1, steps // EPOCH_STEPS)
    model, loss_of, data = {
        "mlp": lambda: ((lambda: mlp(64)), classified, vectors()),
        "counter": lambda: (Counting, classified, vectors()),
        "wide": lambda: ((lambda: mlp(512, inputs=512)), classified, vectors(128, 512)),
        "cnn": lambda: (cnn, classified, pictures()),
        "lm": lambda: (LanguageModel, predicted, tokens(8192, length=257, count=steps)),
        "bert": lambda: (bert, answered, tokens(30522, length=128, count=steps)),
        "llama": lambda: (llama, continued, tokens(8000, length=128, count=steps)),
    }[row]()
    return model, loss_of, (lambda: data), max(1, steps // len(data))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


# The arms.


def there(batch, device):
    return batch.to(device) if isinstance(batch, torch.Tensor) else [part.to(device) for part in batch]


def plain(row, trials, steps, marks, device):
    model, loss_of, handle, epochs = program(row, steps)
    if isinstance(handle, TensorDataset):
        handle = DataLoader(handle, 32, shuffle=True)
    states = []
    for seed in range(trials):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        began = time.perf_counter()
        module = model().to(device)
        optimizer = adam(p for p in module.parameters() if p.requires_grad)
        module.train()
        marks["build"] = time.perf_counter() - began
        for _ in range(epochs):
            total = 0.0
            for batch in handle() if callable(handle) else handle:
                loss = loss_of(module, batch if device == "cpu" else there(batch, device))
                total += loss.item()  # as loops log it
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        marks["step"] = time.perf_counter() - began - marks["build"]
        states.append(module.state_dict())
    return states


def pool(row, trials, steps, marks, devices):
    from hydra_tune import HydraExecutor, TrainTask  # noqa: PLC0415

    options = {"fusion": "on", "fusion_size": trials} if row.startswith("fused") else {}
    model, loss_of, handle, epochs = program(row, steps)
    tasks = [
        TrainTask(
            model=model,
            optimizer=adam,
            param_groups=lambda module: [p for p in module.parameters() if p.requires_grad],
            step=loss_of,
            train=handle,
            batch_size=32 if isinstance(handle, TensorDataset) else None,
            epochs=epochs,
            seed=seed,
        )
        for seed in range(trials)
    ]
    began = time.perf_counter()
    with HydraExecutor(devices=devices, **options) as executor:
        results = executor.run(tasks)
        marks["first"] = time.perf_counter() - began
        for result in results:
            if result.error is not None:
                raise result.error
        return [result.state_dict() for result in results]


def suggested(trial):
    return trial.suggest_float("lr", 1e-4, 1e-2, log=True), trial.suggest_int("width", 48, 80)


def halves():
    inputs, labels = (torch.cat(part) for part in zip(*vectors(), strict=True))
    return TensorDataset(inputs[:1024], labels[:1024]), TensorDataset(inputs[1024:], labels[1024:])


def by_hand(trial):
    """An objective of stock Optuna."""
    from optuna import TrialPruned  # noqa: PLC0415

    (lr, width), (train, held) = suggested(trial), halves()
    torch.manual_seed(trial.number)
    np.random.seed(trial.number)  # noqa: NPY002
    random.seed(trial.number)
    module = mlp(width)
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    value = 0.0
    for epoch in range(10):
        module.train()
        for batch in DataLoader(train, 32, shuffle=True):
            loss = classified(module, batch)
            loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            losses = [(classified(module, batch).item(), len(batch[0])) for batch in DataLoader(held, 32)]
        value = sum(loss * size for loss, size in losses) / sum(size for _, size in losses)
        trial.report(value, epoch)
        if trial.should_prune():
            raise TrialPruned
    return value


def described(trial):
    """The same, as a task for a pool."""
    from hydra_tune import TrainTask  # noqa: PLC0415

    (lr, width), (train, held) = suggested(trial), halves()
    return TrainTask(
        model=lambda: mlp(width),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        step=classified,
        train=train,
        validate=held,
        evaluate=lambda module, batch: {"loss": classified(module, batch)},
        batch_size=32,
        epochs=10,
        seed=trial.number,
    )


def search(arm, device):
    """Sixteen trials of Optuna. Returns what was suggested and reported, by trial."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options = {
        "sampler": optuna.samplers.RandomSampler(seed=0),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=5),
    }
    if arm == "plain":
        study = optuna.create_study(**options)
        study.optimize(by_hand, n_trials=16)
    else:
        import hydra_tune_optuna  # noqa: PLC0415
        from hydra_tune import HydraExecutor  # noqa: PLC0415

        with HydraExecutor(devices=device) as executor:
            study = hydra_tune_optuna.create_study(**options, executor=executor)
            study.optimize(described, n_trials=16)
    return {trial.number: (trial.params, trial.intermediate_values) for trial in study.trials}


def digest(states):
    sums = []
    for state in states:
        summed = hashlib.sha256()
        for name in sorted(state):
            summed.update(name.encode() + state[name].detach().cpu().contiguous().reshape(-1).numpy().tobytes())
        sums.append(summed.hexdigest())
    return sums


def norms(states):
    return [float(torch.cat([part.flatten() for part in state.values()]).norm()) for state in states]


def imports(row, arm):
    """Beside what stands above, so that nothing is imported while an arm is timed."""
    names = {"bert": ["transformers"], "llama": ["transformers"], "optuna": ["optuna"]}.get(row, [])
    if arm != "plain":
        names = [*names, "hydra_tune", *(["hydra_tune_optuna"] if row == "optuna" else [])]
    for name in names:
        module = importlib.import_module(name)
        for lazy in {"transformers": LAZY, "hydra_tune": ("HydraExecutor", "TrainTask")}.get(name, ()):
            getattr(module, lazy)
    torch.set_num_threads(1)


def cpu_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main():
    row, arm, trials, steps, began = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5])
    device = sys.argv[6]
    devices = "cuda:0" if device == "cuda" else "cpu:2" if arm == "pool2" else "cpu:1"
    imports(row, arm)
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    marks = {}
    if row.endswith("_again") and arm != "plain":
        pool(row, trials, EPOCH_STEPS, marks, devices)
    ready, before = time.monotonic(), cpu_seconds()
    if row == "optuna":
        result = search(arm, devices)
    elif arm == "plain":
        result = plain(row, trials, steps, marks, device)
    else:
        result = pool(row, trials, steps, marks, devices)
    if device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.monotonic() - ready, cpu_seconds() - before
    digests = norms if row.startswith("fused") else digest
    bits = sorted(result.items()) if row == "optuna" else digests(result)
    print("FIGURES", json.dumps({"import": ready - began, "wall": wall, "cpu": cpu, "bits": bits, **marks}))


if __name__ == "__main__":
    main()
