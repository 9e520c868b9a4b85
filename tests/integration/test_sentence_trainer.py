"""A `SentenceTransformerTrainer` in the pool gives the bits of its `train()`, with its loss's parameters, whole and cut."""

from functools import partial

import pytest
import torch

pytest.importorskip("accelerate", reason="the trainer needs accelerate")
pytest.importorskip("datasets", reason="the trainer needs datasets")
pytest.importorskip("sentence_transformers", reason="the trainer is of sentence-transformers")

import datasets
import tokenizers
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import evaluation, losses, modules

from hydra_tune import HydraExecutor, train_plain
from hydra_tune_transformers import RefusedTrainerError, task_from_trainer, trainer_from_result

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries

WORDS = [f"w{number}" for number in range(56)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a small model and its tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    transformers.set_seed(1)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return folder


def texts(count, seed):
    """Texts of one length: the pool captures a cut model for each length."""
    numbers = torch.randint(0, 56, (count, 8), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(WORDS[number] for number in row) for row in numbers]


def rows(count, seed, column):
    generator = torch.Generator().manual_seed(seed + 5)
    labels = {
        "score": {"score": torch.rand(count, generator=generator).tolist()},
        "label": {"label": torch.randint(0, 3, (count,), generator=generator).tolist()},
    }
    pairs = {"anchor": texts(count, seed), "positive": texts(count, seed + 1)}
    return datasets.Dataset.from_dict(pairs | labels.get(column, {}))


def sentence_model(saved):
    transformers.set_seed(1)
    return SentenceTransformer(modules=[modules.Transformer(str(saved)), modules.Pooling(32)], device="cpu")


def trainer(saved, *, loss, column=None, given=None, **arguments):
    values = {
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
    }
    model = {} if given and "model_init" in given else {"model": sentence_model(saved)}
    return SentenceTransformerTrainer(
        **model,
        **(given or {}),
        args=SentenceTransformerTrainingArguments(output_dir=str(saved / "out"), **(values | arguments)),
        train_dataset=rows(22, 0, column),
        eval_dataset=rows(10, 50, column),
        loss=loss if model == {} else loss(model["model"]),
    )


def with_labels(model):
    return losses.SoftmaxLoss(model, embedding_dimension=32, num_labels=3)


CASES = {
    "ranking": {"loss": losses.MultipleNegativesRankingLoss},
    "ranking without duplicates": {
        "loss": losses.MultipleNegativesRankingLoss,
        "batch_sampler": "no_duplicates",
        "num_train_epochs": 3,
    },
    "cosine": {"loss": losses.CosineSimilarityLoss, "column": "score", "gradient_accumulation_steps": 2},
    "order of cosines": {"loss": losses.CoSENTLoss, "column": "score", "learning_rate_mapping": {"bias": 1e-2}},
    "a loss with parameters": {"loss": with_labels, "column": "label", "max_grad_norm": 0.0},
}


@pytest.fixture(scope="module")
def stock(saved):
    """`train()` of each case, once."""
    runs = {}

    def run(name):
        if name not in runs:
            make = partial(trainer, saved, **CASES[name])
            transformers.set_seed(42)
            trained = make()
            trained.train()
            runs[name] = make, trained
        return runs[name]

    return run


def assert_same(result, trained):
    weights = trained.model.state_dict()
    own = {name: value for name, value in trained.loss.state_dict().items() if not name.startswith("model.")}
    if own:
        weights = {f"model.{name}": value for name, value in weights.items()}
        weights |= {f"losses.loss.{name}": value for name, value in own.items()}
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    reports = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert [entry["val_loss"] for entry in result.history] == reports


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_the_task_is_the_trainers_training(stock, name, tmp_path):
    make, trained = stock(name)
    task = task_from_trainer(make)
    assert_same(train_plain(task), trained)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert_same(result, trained)
    again = trainer_from_result(make, result)
    assert again.evaluate()["eval_loss"] == result.metrics["val_loss"]
    again.save_model(tmp_path / "saved")
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    make, trained = stock(name)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert result.num_shards == 2
    assert_same(result, trained)


def test_what_would_not_be_exact_is_refused(saved):
    def make(**changes):
        return partial(trainer, saved, **({"loss": losses.MultipleNegativesRankingLoss} | changes))

    evaluator = evaluation.EmbeddingSimilarityEvaluator(texts(4, 0), texts(4, 1), [0.1, 0.2, 0.3, 0.4])
    with pytest.raises(RefusedTrainerError, match="an evaluator, which the pool would not call: call it with"):
        task_from_trainer(make(given={"evaluator": evaluator}))
    with pytest.raises(RefusedTrainerError, match=r"with tensors of its own, .*: set max_grad_norm=0"):
        task_from_trainer(make(loss=with_labels, column="label"))
    with pytest.raises(RefusedTrainerError, match=r"bf16=True with .* a compute_loss of the Trainer's own"):
        task_from_trainer(make(bf16=True))
    with pytest.raises(RefusedTrainerError, match="a model_init that call_model_init puts into the loss: give model="):
        task_from_trainer(make(given={"model_init": partial(sentence_model, saved)}))
