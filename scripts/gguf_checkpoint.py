#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["gguf==0.19.0", "ml-dtypes==0.5.4", "numpy==2.4.6", "safetensors==0.8.0", "tokenizers==0.23.3"]
# ///
"""Turns a GGUF file of a Gemma 3 text model into a BF16 checkpoint as Hugging Face transformers and vLLM load it.

    uv run --script scripts/gguf_checkpoint.py gemma.gguf.part* /tmp/gemma [--sha256 SUM]

Weights are dequantized by the ``gguf`` library and rounded to BF16. Configuration and tokenizer come from the file's
metadata. No torch is needed: it runs on any machine, where uv makes it a place of its own. Other architectures are
refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Parts of a block: GGUF -> transformers."""

GLOBAL_EVERY = 6
"""Gemma 3: five layers with a sliding window, one without. The file does not say so, nor the next two."""
LOCAL_ROPE_THETA = 10000.0

SPACE = "▁"
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in GGUF: never found in text by themselves; found before the text is split."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+", help="the GGUF file, or its pieces in order")
    parser.add_argument("destination", type=Path, help="folder to write; made if it is not there")
    parser.add_argument("--sha256", help="of the whole file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        with whole.open("wb") as file:
            for part in args.parts:
                shutil.copyfileobj(part.open("rb"), file)
        if args.sha256:
            with whole.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != args.sha256:
                raise SystemExit(f"the file's SHA-256 is {found}, not {args.sha256}")
        convert(whole, args.destination)


def convert(source: Path, destination: Path) -> None:
    """Write the checkpoint of a GGUF file."""
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "gemma3":
        raise SystemExit(f"architecture {fields['general.architecture']!r}: only Gemma 3 is known here")
    destination.mkdir(parents=True, exist_ok=True)
    write_json(destination / "config.json", configuration(fields))
    tokenizer(fields).save(str(destination / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    write_json(
        destination / "tokenizer_config.json",
        {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        | ({"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}),
    )
    tensors = {transformers_name(tensor.name): bfloat16(tensor) for tensor in reader.tensors}
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})


def configuration(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers' ``Gemma3TextConfig`` is told."""

    def of(name: str) -> Any:
        return fields[f"gemma3.{name}"]

    layers, head_dim = of("block_count"), of("attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        # Of older checkpoints transformers says that Mistral's tokenizer has to be mended, whatever they are.
        "transformers_version": "5.0.0",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": of("context_length"),
        # In the file it is an FP32 number.
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": of("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % GLOBAL_EVERY == 0 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": of("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_THETA},
        },
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """SentencePiece's byte pairs: of all neighbours the two are joined whose whole has the highest score."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    types = fields["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens)}
    joined = sorted((i for i, kind in enumerate(types) if kind == 1 and len(tokens[i]) > 1), key=lambda i: -scores[i])
    merges = []
    for i in joined:
        token = tokens[i]
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += sorted((pair for pair in halves if pair[0] in ids and pair[1] in ids), key=lambda p: ids[p[0]])
    made = Tokenizer(
        models.BPE(
            ids, merges, unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]], fuse_unk=True, byte_fallback=True
        )
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    # Nothing is left to split by; it keeps the whole text one piece.
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    for kind in (CONTROL, USER_DEFINED):
        made.add_tokens([
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, its_kind in zip(tokens, types, strict=True)
            if its_kind == kind
        ])  # fmt: skip
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = fields["tokenizer.ggml.bos_token_id"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return made


def transformers_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block is None or block[2] not in NAMES:
        raise SystemExit(f"tensor {name}: not known of Gemma 3")
    return f"model.layers.{block[1]}.{NAMES[block[2]]}.weight"


def bfloat16(tensor: ReaderTensor) -> np.ndarray:
    """A tensor's values, rounded to nearest."""
    values = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("norm.weight"):
        # Gemma's norms multiply by 1 + weight, those of GGUF by what is stored.
        values = values - 1
    return np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
