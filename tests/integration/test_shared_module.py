"""Trials on one frozen base train as each would alone, to the last bit, while the base lies in memory once."""

import copy
import gc
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import EventStream, HydraExecutor, Reported, SharedModule, TrainTask, load_module, train_plain
from hydra_tune.errors import CheckpointError, TaskError
from hydra_tune.memory.shared import shared_block, shared_file
from hydra_tune.pool.job import OVER

PATIENCE_SECONDS = 60
WIDTH, CLASSES, LAYERS = 160, 10, 3
RANKS = (2, 4, 8, 16)
CUT = {"devices": "cpu:1", "device_memory": "300KiB"}
WAYS = {
    "whole": {"devices": "cpu:1"},
    "whole behind a link": {"devices": "cpu:1", "link_bandwidth": "10GB/s"},
    "whole on two devices behind links": {"devices": "cpu:2", "link_bandwidth": "10GB/s"},
    "whole in turns": {"devices": "cpu:1", "device_memory": "1000KiB", "link_bandwidth": "10GB/s"},
    "cut": CUT,
    "cut by turns": CUT | {"policy": "round_robin"},
    "cut on two devices": CUT | {"devices": "cpu:2"},
    "cut, updated on the host": CUT | {"optimizer_placement": "host"},
    "cut, spilled to disk": CUT | {"host_memory": "550KiB"},
}
FAST = {"whole", "whole behind a link", "cut"}
PATHS = {"whole": WAYS["whole"], "behind a link": WAYS["whole behind a link"], "cut": CUT}


class Trunk(nn.Module):
    """A model with tied layers, a buffer that its forward writes, and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers.append(self.layers[0])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = functional.dropout(functional.relu(layer(x)) + x, 0.1, training=self.training)
        return self.head(self.norm(x))


class Lora(nn.Module):
    def __init__(self, inner, rank):
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + functional.linear(functional.linear(x, self.down), self.up)


def adapted(base, rank, *, owns=False):
    model = base.module(copy=owns)
    for index, layer in enumerate(model.layers):
        if not isinstance(layer, Lora):
            model.layers[index] = Lora(layer, rank)
    model.layers[-1] = model.layers[0]
    return model


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def data(num_samples=48):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (num_samples,), generator=generator))


def task(model, seed=0, **changes):
    arguments = {
        "model": model,
        "param_groups": trained,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "loss": functional.cross_entropy,
        "train": data(),
        "validate": data(16),
        "batch_size": 16,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def lora_tasks(base, **options):
    return [task(partial(adapted, base, rank, **options), seed=rank) for rank in RANKS]


def assert_same(result, plain):
    assert result.status == "completed", result.error
    assert [report["train_loss"] for report in result.history] == [report["train_loss"] for report in plain.history]
    assert result.metrics == plain.metrics
    expected = plain.state_dict()
    assert result.state_dict().keys() == expected.keys()
    for name, tensor in result.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def at_first_report(pool, tasks):
    """Submit tasks, and wait until each waits at its first report."""
    events = EventStream()
    jobs = [pool.submit(each, events=events) for each in tasks]
    for _ in jobs:
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
    return jobs, events


def results_of(jobs, events):
    """Let trials that wait at a report go on to their ends."""
    for job in jobs:
        job.proceed()
    while not all(job.state in OVER for job in jobs):
        event = events.get(PATIENCE_SECONDS)
        if isinstance(event, Reported):
            event.job.proceed()
    return [job.result(PATIENCE_SECONDS) for job in jobs]


@pytest.fixture(scope="module")
def base():
    return SharedModule(Trunk, seed=1)


@pytest.fixture(scope="module")
def plain(base):
    """Each trial alone."""
    return [train_plain(described) for described in lora_tasks(base)]


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_trials_on_one_base_train_as_each_alone(base, plain, way, tmp_path):
    options = WAYS[way] | ({"spill_dir": tmp_path} if "host_memory" in WAYS[way] else {})
    with HydraExecutor(**options) as pool:
        results = pool.run(lora_tasks(base))
    for result, expected in zip(results, plain, strict=True):
        assert (result.num_shards > 1) == way.startswith("cut")
        assert_same(result, expected)
    assert not shared_block._COPIES, "the last trial takes the copies on devices with it"


@pytest.mark.slow
def test_batches_side_by_side_read_the_base_on_both_devices(base):
    described = [
        task(partial(adapted, base, rank), seed=rank, accumulate=2, parallel="data", batch_size=8) for rank in RANKS[:1]
    ]
    with HydraExecutor(**CUT | {"devices": "cpu:2"}) as pool:
        results = pool.run(described)
        assert sum(pool.stats().steps_by_way.get(way, 0) for way in ("data-parallel", "grouped", "pipelined"))
    for result, one in zip(results, described, strict=True):
        assert_same(result, train_plain(one))


@pytest.mark.cases(1 / 3)
def test_the_first_use_of_a_base_leaves_the_numbers_of_its_trial_alone():
    fresh = SharedModule(Trunk, seed=1)
    first, second = train_plain(lora_tasks(fresh)[0]), train_plain(lora_tasks(fresh)[0])
    assert_same(second, first)
    with HydraExecutor(**CUT) as pool:
        (pooled,) = pool.run(lora_tasks(SharedModule(Trunk, seed=1))[:1])
    assert_same(pooled, first)
    before = torch.get_rng_state()
    SharedModule(Trunk).module()
    assert torch.equal(torch.get_rng_state(), before)
    other = SharedModule(Trunk, seed=2).module().head.weight
    assert not torch.equal(other, fresh.module().head.weight)


@pytest.mark.slow
def test_the_base_is_counted_once_on_the_device_and_on_the_host(base, plain, tmp_path):
    nbytes = sum(parameter.nbytes for parameter in base.module().parameters())
    resident = {}
    for owns in (False, True):
        with HydraExecutor(**WAYS["whole behind a link"]) as pool:
            at_first_report(pool, lora_tasks(base, owns=owns))
            resident[owns] = pool.stats().devices["cpu:0"].resident_bytes
    assert resident[True] - resident[False] == pytest.approx(3 * nbytes, rel=0.02)
    # All trials are admitted at once where their adapters have room beside a single base.
    with HydraExecutor(**CUT, host_memory=4 * nbytes, max_concurrent=4) as pool:
        at_first_report(pool, lora_tasks(base))
    memory = int(1.5 * nbytes)
    with HydraExecutor(**CUT, host_memory=memory, spill_dir=tmp_path) as pool:
        at_first_report(pool, lora_tasks(base)[:2])
        disk = pool.stats().disk
    assert nbytes < disk.host_peak_bytes <= memory
    with HydraExecutor(**CUT, host_memory=int(0.9 * nbytes), spill_dir=tmp_path) as pool:
        refused = pool.submit(lora_tasks(base)[0]).result(PATIENCE_SECONDS)
    assert "raise host_memory" in str(refused.error)


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", ["lrtf", "round_robin"])
def test_trials_go_through_a_cut_base_together_and_load_it_once_for_all(base, policy):
    loaded = {}
    for owns in (False, True):
        tasks = [replace(each, epochs=5) for each in lora_tasks(base, owns=owns)[:2]]
        with HydraExecutor(**CUT | {"policy": policy}) as pool:
            waiting = at_first_report(pool, tasks)
            before = pool.stats().devices["cpu:0"].bytes_in_by_kind["parameters"]
            assert all(result.num_shards > 1 for result in results_of(*waiting))
            loaded[owns] = pool.stats().devices["cpu:0"].bytes_in_by_kind["parameters"] - before
    assert loaded[False] < 0.75 * loaded[True]


def corrected(base):
    """Writes the base as it is built, as PiSSA does, past every count of versions."""
    model = adapted(base, 4)
    for layer in model.layers[:3]:
        layer.inner.weight.data -= layer.inner.weight.data.mean()
    return model


def thawed(base):
    model = adapted(base, 4)
    model.layers[1].inner.weight.requires_grad_(True)
    model.head.requires_grad_(True)
    return model


def replaced(base):
    model = adapted(base, 4)
    model.head = nn.Linear(WIDTH, CLASSES)
    model.layers[2].inner.weight = nn.Parameter(model.layers[2].inner.weight * 2, requires_grad=False)
    return model


def probed(base):
    model = base.module()
    model.head.requires_grad_(True)
    return model


@pytest.mark.parametrize("way", ["whole", "behind a link", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_trial_that_thaws_writes_or_replaces_the_base_has_its_own(base, plain, way):
    tasks = [task(partial(model, base)) for model in (corrected, thawed, replaced, probed)]
    # Room for the state of a trained layer.
    options = PATHS[way] | ({"device_memory": "800KiB", "num_shards": 3} if way == "cut" else {})
    with HydraExecutor(**options) as pool:
        *results, last = pool.run([*tasks, lora_tasks(base)[3]])
    for result, described in zip(results, tasks, strict=True):
        assert_same(result, train_plain(described))
    assert_same(last, plain[3])


def merge(module, _optimizer, steps):
    """Merges an adapter into the base, and takes it out again in the next step."""
    layer = module.layers[1]
    with torch.no_grad():
        layer.inner.weight.data += (1 if steps % 2 else -1) * layer.up @ layer.down


def merge_counted(module, _optimizer, steps):
    with torch.no_grad():
        module.layers[1].inner.weight.mul_(1 + 0.1 * (steps == 2))


def exchange(module, _optimizer, steps):
    if steps == 2:
        module.layers[1].inner.weight.data = module.layers[1].inner.weight.data * 0.5


def thaw(module, _optimizer, steps):
    if steps == 3:
        module.layers[2].inner.weight.requires_grad_(True)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("after_step", "way"),
    [
        (merge, "whole"),
        (merge, "cut"),
        (merge_counted, "whole"),
        pytest.param(merge_counted, "cut", marks=pytest.mark.slow),
        pytest.param(exchange, "cut", marks=pytest.mark.slow),
        (exchange, "behind a link"),
        (thaw, "whole"),
    ],
)
def test_a_base_written_in_training_becomes_the_writers_own(base, plain, way, after_step):
    groups = {"param_groups": None} if after_step is thaw else {}
    writer = task(partial(adapted, base, 4), after_step=after_step, **groups)
    with HydraExecutor(**PATHS[way]) as pool:
        result, other = pool.run([writer, lora_tasks(base)[3]])
    assert_same(result, train_plain(writer))
    assert_same(other, plain[3])


def test_a_device_counts_what_a_writer_owns_beside_the_base(base):
    resident = {}
    for after_step in (None, merge_counted):
        with HydraExecutor(**PATHS["whole"]) as pool:
            writer = task(partial(adapted, base, RANKS[1]), after_step=after_step)
            at_first_report(pool, [writer, lora_tasks(base)[1]])
            resident[after_step] = pool.stats().devices["cpu:0"].resident_bytes
    assert resident[merge_counted] - resident[None] == WIDTH * WIDTH * 4


def test_a_write_to_a_copy_that_others_compute_with_fails_its_trial_alone(base, plain):
    writer = task(partial(adapted, base, 4), after_step=merge_counted)
    with HydraExecutor(**PATHS["behind a link"]) as pool:
        jobs = [pool.submit(each) for each in (writer, *lora_tasks(base))]
        result, *others = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert isinstance(result.error, TaskError)
    assert "'layers.1.inner.weight' of a shared base" in str(result.error)
    for other, expected in zip(others, plain, strict=True):
        assert_same(other, expected)


@pytest.mark.cases(1 / 3)
def test_the_model_of_a_result_is_the_users_own(base, plain):
    with HydraExecutor(**CUT) as pool:
        first, second = pool.run(lora_tasks(base)[:2])
    kept = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with torch.no_grad():
        for tensor in first.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in second.state_dict().items())
    assert_same(train_plain(lora_tasks(base)[0]), plain[0])


@pytest.mark.cases(1 / 3)
def test_nothing_of_a_base_stays_once_nobody_has_it():
    gc.collect()
    before = len(shared_file._SOURCES)
    unseen = SharedModule(Trunk)
    with HydraExecutor(**CUT) as pool:
        results = pool.run(lora_tasks(unseen)[:1])
    assert len(shared_file._SOURCES) > before
    del unseen, results
    gc.collect()
    assert len(shared_file._SOURCES) == before


class Bent(Trunk):
    """The trunk with another bit in one weight."""

    def __init__(self):
        super().__init__()
        self.layers[1].weight.data.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize("way", ["whole", "behind a link", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_checkpoint_holds_the_adapter_and_resumes_on_the_same_base_alone(base, plain, way, tmp_path):
    described = lora_tasks(base)[1]
    with HydraExecutor(**PATHS[way], checkpoint_dir=tmp_path) as pool:
        events = EventStream()
        job = pool.submit(described, "trial", events)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        path = job.checkpoint(PATIENCE_SECONDS)
        job.cancel()
    stored_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert stored_bytes < base.nbytes
    again = lora_tasks(SharedModule(Trunk, seed=1))[1]
    owned = task(partial(adapted, base, RANKS[1], owns=True), seed=RANKS[1])
    with HydraExecutor(**PATHS[way]) as pool:
        jobs = [pool.submit(each, resume_from=path) for each in (again, owned)]
        for each in jobs:
            assert_same(each.result(PATIENCE_SECONDS), plain[1])
        bent = pool.submit(lora_tasks(SharedModule(Bent, seed=1))[1], resume_from=path).result(PATIENCE_SECONDS)
    assert isinstance(bent.error, CheckpointError)
    assert "'layers.1.inner.weight'" in str(bent.error)
    assert "another base" in str(bent.error)
    loaded = load_module(described, path)
    assert torch.equal(loaded.head.weight, base.module().head.weight)
    with pytest.raises(CheckpointError, match="another base"):
        load_module(lora_tasks(SharedModule(Bent, seed=1))[1], path)


@pytest.mark.cases(1 / 3)
def test_trials_pruned_at_a_report_leave_the_others_alone(base, plain):
    with HydraExecutor(**CUT) as pool:
        events = EventStream()
        doomed = pool.submit(lora_tasks(base)[0], "doomed", events)
        others = [pool.submit(each) for each in lora_tasks(base)[1:2]]
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        doomed.prune()
        assert doomed.result(PATIENCE_SECONDS).status == "pruned"
        for job, expected in zip(others, plain[1:2], strict=True):
            assert_same(job.result(PATIENCE_SECONDS), expected)


@pytest.mark.cases(1 / 3)
def test_two_bases_serve_at_once(base, plain):
    other = SharedModule(Trunk, seed=5)
    tasks = [lora_tasks(base)[0], lora_tasks(other)[1]]
    with HydraExecutor(**CUT) as pool:
        results = pool.run(tasks)
    for result, expected in zip(results, [plain[0], train_plain(tasks[1])], strict=True):
        assert_same(result, expected)


@pytest.mark.cases(1 / 3)
def test_a_base_goes_to_another_process_by_its_recipe(base, plain):
    with HydraExecutor(**CUT, isolate=True) as pool:
        (result,) = pool.run(lora_tasks(base)[:1])
    assert_same(result, plain[0])
    sent = pickle.loads(pickle.dumps(base))
    assert_same(train_plain(lora_tasks(sent)[0]), plain[0])
    assert copy.deepcopy(base) is base


@pytest.mark.slow
def test_a_llama_of_half_precision_is_a_base():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
        use_cache=False,
    )
    llama = SharedModule(lambda: transformers.LlamaForCausalLM(config).bfloat16())

    def model(rank):
        made = llama.module()
        for layer in made.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj, rank).bfloat16()
        made.model.norm.weight.requires_grad_(True)
        return made

    tokens = torch.randint(256, (16, 12), generator=torch.Generator().manual_seed(0))
    tasks = [
        task(
            partial(model, rank),
            seed=rank,
            train=TensorDataset(tokens),
            validate=None,
            loss=None,
            step=lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
            batch_size=4,
            max_grad_norm=1.0,
            accumulate=2,
        )
        for rank in (2, 8)
    ]
    plain = [train_plain(each) for each in tasks]
    for options in ({}, {"device_memory": "240KiB"}):
        with HydraExecutor("cpu:1", **options) as pool:
            results = pool.run(tasks)
        for result, expected in zip(results, plain, strict=True):
            assert (result.num_shards > 1) == bool(options)
            assert_same(result, expected)


def test_a_base_that_is_no_module_or_not_on_the_host_is_refused_by_name():
    with pytest.raises(TaskError, match="SharedModule needs a function"):
        SharedModule(Trunk())
    with pytest.raises(TaskError, match=r"build= of a SharedModule must return a torch\.nn\.Module, but returned str"):
        SharedModule(lambda: "model").module()
    with pytest.raises(TaskError, match=r"'layers\.0\.weight' on meta"):
        SharedModule(lambda: Trunk().to("meta")).module()
