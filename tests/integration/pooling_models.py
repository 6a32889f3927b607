"""Random checkpoints that give vectors or scores instead of text, with the embedded checkpoint's vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tests.integration import checkpoints
from tests.integration.engine import MODEL
from tests.integration.test_encoder import MODELS, random_encoder

NO, YES = "Ġno", "Ġgood"
"""The tokens by which a generative reranker answers."""

QUERY = "Who built the ark?"
DOCUMENTS = [
    "He made the ark of gopher wood.",
    "The wise shall inherit glory.",
    "And Noah did according unto all that God commanded him, so did he. " * 4,
    "Selah.",
]

PAIRS = (("Who was Noah?", "A just man."), ("Who was Noah?", "Selah."), ("And", "the wise shall inherit glory: " * 3))
"""Some pairs to see how a random cross encoder answers."""


def make_embedder(directory: Path) -> PreTrainedModel:
    """A BERT whose vectors are the first token's states; in FP32."""
    model = random_encoder(MODELS["bert"])
    model.config.architectures = ["BertModel"]
    _save(model, directory)
    return model


def make_cross_encoder(directory: Path) -> PreTrainedModel:
    """A BERT that reads a query and a document at once and gives one number; in FP32."""
    config = BertConfig(**{**MODELS["bert"].to_dict(), "num_labels": 1})
    model = random_encoder(config, AutoModelForSequenceClassification)
    model.config.architectures = ["BertForSequenceClassification"]
    _save(model, directory)
    # Numbers around 0 that are not all alike: as random weights give them, all scores would be near 0 or 1.
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits[0] for pair in PAIRS])
        scale = 1 / logits.std()
        weight, bias = model.classifier.weight, model.classifier.bias
        weight.copy_((weight * scale).to(torch.bfloat16))
        bias.copy_(((bias - logits.mean()) * scale).to(torch.bfloat16))
    _save(model, directory)
    return model


def make_generative_reranker(directory: Path) -> PreTrainedModel:
    """A decoder that would answer with one of two words, as Qwen3-Reranker does; in FP32."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = checkpoints.random_model(config)
    model.config.architectures = ["Qwen3ForCausalLM"]
    _save(model, directory, encoder=False)
    return model


RERANKER_OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [NO, YES],
    "is_original_qwen3_reranker": True,
}
"""What makes a scorer of that decoder, ``hf_overrides``."""


@torch.no_grad()
def vectors(model: PreTrainedModel, directory: Path, texts: list[str]) -> torch.Tensor:
    """What the embedder has to give, to unit length: [texts, hidden]."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.backends.mkldnn.flags(enabled=False):
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in texts]
    return torch.nn.functional.normalize(torch.stack(states), dim=1)


@torch.no_grad()
def scores(model: PreTrainedModel, directory: Path, query: str, documents: list[str]) -> torch.Tensor:
    """What the cross encoder or the generative reranker has to give: [documents], from 0 to 1."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    with torch.backends.mkldnn.flags(enabled=False):
        for document in documents:
            if isinstance(model.config, BertConfig):
                logit = model(**tokenizer(query, document, return_tensors="pt")).logits[0, 0]
            else:
                ids = tokenizer(query + document, return_tensors="pt").input_ids
                no, yes = tokenizer.convert_tokens_to_ids([NO, YES])
                logits = model(ids).logits[0, -1]
                logit = logits[yes] - logits[no]
            found.append(logit.sigmoid())
    return torch.stack(found)


def _save(model: PreTrainedModel, directory: Path, encoder: bool = True) -> None:
    """Write it with a tokenizer; an encoder's says which of two texts a token is of."""
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    if not encoder:
        return
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    first, last = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|bos|>", "<|eos|>"))
    one, two = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    end = {"SpecialToken": {"id": "<|eos|>", "type_id": 1}}
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(("<|bos|>", "<|eos|>"))}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, one, last],
        "pair": [first, one, last, two, end],
        "special_tokens": tokens,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "sep_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
