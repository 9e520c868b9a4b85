"""An `SFTTrainer` of trl in the pool gives the bits of its `train()`, whole and cut, and its metrics."""

from functools import partial

import pytest
import torch

pytest.importorskip("accelerate", reason="SFTTrainer needs accelerate")
pytest.importorskip("datasets", reason="SFTTrainer needs datasets")
pytest.importorskip("peft", reason="the adapter is made with peft")
pytest.importorskip("trl", reason="SFTTrainer is of trl")

import datasets
import peft
import tokenizers
import transformers
import trl

from hydra_tune import HydraExecutor, train_plain
from hydra_tune_transformers import RefusedTrainerError, task_from_trainer, trainer_from_result

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries


@pytest.fixture(scope="module", autouse=True)
def _without_telemetry():
    """Keep trl, which reports each trainer, off the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        yield


WORDS = [f"w{number}" for number in range(56)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer():
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def model():
    transformers.set_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attention_dropout=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 56, (n,), generator=generator)) for n in lengths]


def rows(count, seed, *, has_prompts=False):
    if has_prompts:
        return datasets.Dataset.from_dict({"prompt": texts(count, seed), "completion": texts(count, seed + 10)})
    return datasets.Dataset.from_dict({"text": texts(count, seed)})


def lora():
    return peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )


def accuracy(predicted):
    known = predicted.label_ids != -100
    hits = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": float(hits[known].mean()), "spread": float(predicted.predictions.std())}


def trainer(folder, *, has_prompts=False, given=None, kind=trl.SFTTrainer, **arguments):
    values = {
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "logging_strategy": "epoch",
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "pad_to_multiple_of": 16,
    }
    own = {"model": model()} | (given or {})
    return kind(
        **own,
        args=trl.SFTConfig(output_dir=str(folder), **(values | arguments)),
        train_dataset=rows(22, 0, has_prompts=has_prompts),
        eval_dataset=rows(10, 1, has_prompts=has_prompts),
        processing_class=tokenizer(),
    )


CASES = {
    "defaults of trl": {"bf16": None},  # bfloat16, and recomputed activations
    "an adapter": {"given": {"peft_config": lora()}, "gradient_accumulation_steps": 2},
    "prompts and completions": {
        "has_prompts": True,
        "given": {"compute_metrics": accuracy},
        "gradient_accumulation_steps": 2,
    },
    "packed": {"packing": True, "max_length": 24, "pad_to_multiple_of": None, "bf16": True},
    "packed and cut anywhere": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "dynamic fine-tuning": {"loss_type": "dft", "activation_checkpointing": False, "gradient_checkpointing": False},
    "smoothed labels": {"label_smoothing_factor": 0.1},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`SFTTrainer.train()` of each case, once."""
    runs = {}

    def run(name):
        if name not in runs:
            make = partial(trainer, tmp_path_factory.mktemp("sft"), **CASES[name])
            transformers.set_seed(42)
            trained = make()
            trained.train()
            runs[name] = make, trained
        return runs[name]

    return run


def assert_same(result, trained):
    state, weights = result.state_dict(), trained.model.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    reports = [entry for entry in trained.state.log_history if "eval_loss" in entry]
    names = [name for name in result.metrics if name.startswith("val_")]
    assert {"val_loss", "val_entropy", "val_mean_token_accuracy"} <= set(names)
    assert "val_num_tokens" not in names
    assert len(result.history) == len(reports)
    for entry, report in zip(result.history, reports, strict=True):
        assert {name: entry[name] for name in names} == {
            name: report["eval_" + name.removeprefix("val_")] for name in names
        }
    logged = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert [entry["train_loss"] for entry in result.history] == pytest.approx(logged, abs=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_the_task_is_the_trainers_training(stock, name):
    make, trained = stock(name)
    task = task_from_trainer(make)
    assert_same(train_plain(task), trained)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert result.num_shards == 1
    assert_same(result, trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    make, trained = stock(name)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert result.num_shards == 2
    assert_same(result, trained)


@pytest.mark.cases(1 / 3)
def test_an_adapter_leaves_its_base_and_becomes_a_trainer(stock, tmp_path):
    make, trained = stock("an adapter")
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert_same(result, trained)
    before, after = make().model.state_dict(), result.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if "lora" in name}
    again = trainer_from_result(make, result)
    assert again.evaluate()["eval_loss"] == result.metrics["val_loss"]
    again.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.cases(1 / 3)
def test_trials_of_one_model_evaluate_with_their_own_weights(tmp_path):
    """`SFTTrainer` puts a function that calls the former `forward` on the model."""
    shared, own = model(), {"compute_metrics": accuracy}
    trained = trainer(tmp_path, given=own, num_train_epochs=1)
    trained.train()
    with HydraExecutor("cpu:1") as pool:
        tasks = [task_from_trainer(partial(trainer, tmp_path, given=own | {"model": shared}, num_train_epochs=1))] * 2
        results = pool.run(tasks)
    for result in results:
        assert_same(result, trained)


def test_an_older_trl_is_refused_by_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "__version__", "0.29.1")
    with pytest.raises(
        RefusedTrainerError, match=r"trl 0\.29\.1, whose trainers have not been compared: install trl>=1$"
    ):
        task_from_trainer(partial(trainer, tmp_path))


class Steps(trl.SFTTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args.activation_offloading": True}, "activation_offloading=True: leave it out; the pool spills"),
        ({"args.use_liger_kernel": True}, "use_liger_kernel=True: leave it out; its kernels"),
        ({"_is_vision_dataset": True}, "a dataset with images in a trainer of trl.*: train on texts"),
        ({"aux_loss_enabled": True}, "a loss of a model's router.*: set router_aux_loss_coef=0.0"),
    ],
)
def test_what_would_not_be_exact_is_refused(tmp_path, changes, message):
    def make():
        made = trainer(tmp_path)
        for path, value in changes.items():
            owner, _, name = path.rpartition(".")
            setattr(made.args if owner else made, name, value)
        return made

    with pytest.raises(RefusedTrainerError, match=message):
        task_from_trainer(make)


def test_a_step_of_a_subclass_is_refused(tmp_path):
    with pytest.raises(RefusedTrainerError, match="Steps has its own training_step, which the pool would not call"):
        task_from_trainer(partial(trainer, tmp_path, kind=Steps))
