"""Models of the transformers library, from configurations, with random weights; they compute their own loss."""

import torch
import transformers
from torch import Tensor, nn

from tests.parity.zoo.entry import Entry, images, texts

_BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=23, max_position_embeddings=16, num_labels=4, **_BLOCKS)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=23, max_position_embeddings=16, num_key_value_heads=1, use_cache=False, **_BLOCKS
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=4, **_BLOCKS)
    return transformers.ViTForImageClassification(config)


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).loss


def _classified(count: int):
    return [{"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": label} for ids, label in texts(count)]


def _causal(count: int):
    return [
        {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
        for ids, _ in texts(count)
    ]


def _reversed(count: int):
    return [{"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.flip(0)} for ids, _ in texts(count)]


def _unmasked(count: int):
    return [{"input_ids": ids, "labels": ids} for ids, _ in texts(count)]


def _mostly_full(samples):
    """Five samples of six have no padding: many batches have a mask of ones only, which these models skip."""

    def made(count: int):
        found = samples(count)
        for index, sample in enumerate(found):
            if index % 6:
                sample["attention_mask"] = torch.ones_like(sample["attention_mask"])
        return found

    return made


def _pictures(count: int):
    return [{"pixel_values": pixels, "labels": label} for pixels, label in images(count)]


def _shorter(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:, :10].contiguous() if value.dim() == 2 else value for key, value in batch.items()}


def scores(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    output = module(**batch)
    return {"loss": output.loss, "peak": output.logits.max(), "spread": torch.std(output.logits)}


def _entry(name: str, what: str, model, samples, shorter=_shorter, **changes) -> Entry:
    return Entry(
        name=name, what=what, model=model, samples=samples, step=loss, shorter=shorter, evaluate=scores, **changes
    )


ENTRIES = [
    _entry("hf_bert", "`BertForSequenceClassification`", bert, _classified),
    _entry("hf_gpt2", "`GPT2LMHeadModel`, tied embeddings", gpt2, _causal),
    _entry("hf_t5", "`T5ForConditionalGeneration`, encoder states and shared embeddings", t5, _reversed),
    _entry("hf_llama", "`LlamaForCausalLM`, rotary positions, grouped heads", llama, _causal),
    _entry(
        "hf_bert_full", "`BertForSequenceClassification`, only some batches padded", bert, _mostly_full(_classified)
    ),
    _entry(
        "hf_t5_full",
        "`T5ForConditionalGeneration`, only some batches padded",
        t5,
        _mostly_full(_reversed),
    ),
    _entry("hf_gpt2_unmasked", "`GPT2LMHeadModel` without an attention mask", gpt2, _unmasked),
    _entry("hf_llama_unmasked", "`LlamaForCausalLM` without an attention mask", llama, _unmasked),
    _entry("hf_vit", "`ViTForImageClassification`", vit, _pictures, None),
]
