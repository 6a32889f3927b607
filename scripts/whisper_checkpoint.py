#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy==2.4.6", "safetensors==0.8.0"]
# ///
"""Turns a Whisper of CTranslate2 (``model.bin``) into a checkpoint as Hugging Face transformers and vLLM load it.

    uv run --script scripts/whisper_checkpoint.py folder model.bin.part* /tmp/whisper [--seconds 5] [--sha256 SUM]

``folder`` has the model's config.json and tokenizer.json. ``--seconds`` keeps that much of the encoder's positions:
what is said in the first seconds is understood as before, and shorter audio need not be filled up to thirty.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""CTranslate2's numbers of data types."""

POSITIONS_PER_SECOND = 50
"""Of the encoder: a frame of 10 ms, halved by the second convolution."""

NAMES = (
    (r"^(encoder|decoder)/", r"model.\1."),
    (r"embeddings/", "embed_tokens."),
    (r"position_encodings/encodings", "embed_positions.weight"),
    (r"layer_(\d+)/", r"layers.\1."),
    (r"self_attention/layer_norm/", "self_attn_layer_norm."),
    (r"attention/layer_norm/", "encoder_attn_layer_norm."),
    (r"ffn/layer_norm/", "final_layer_norm."),
    (r"ffn/linear_0/", "fc1."),
    (r"ffn/linear_1/", "fc2."),
    (r"self_attention/linear_0/", "self_attn.q_proj+k_proj+v_proj."),
    (r"self_attention/linear_1/", "self_attn.out_proj."),
    (r"attention/linear_0/", "encoder_attn.q_proj."),
    (r"attention/linear_1/", "encoder_attn.k_proj+v_proj."),
    (r"attention/linear_2/", "encoder_attn.out_proj."),
    (r"gamma$", "weight"),
    (r"beta$", "bias"),
    (r"/", "."),
)
"""Patterns in a name and what stands for them with transformers, in this order; ``+``: rows of several matrices."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="has config.json and tokenizer.json")
    parser.add_argument("parts", type=Path, nargs="+", help="model.bin, or its pieces in order")
    parser.add_argument("destination", type=Path, help="folder to write; made if it is not there")
    parser.add_argument("--seconds", type=int, default=30, help="of audio that a request may have")
    parser.add_argument("--sha256", help="of the whole model.bin")
    args = parser.parse_args()
    whole = b"".join(part.read_bytes() for part in args.parts)
    found = hashlib.sha256(whole).hexdigest()
    if args.sha256 and found != args.sha256:
        raise SystemExit(f"SHA-256 of model.bin is {found}, not {args.sha256}")
    args.destination.mkdir(parents=True, exist_ok=True)
    convert(dict(variables(whole)), args.folder, args.seconds, args.destination)


def variables(whole: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """What a model.bin holds: little endian; strings with their length (two bytes) and a zero behind.

    Version, name and revision of the model's kind; the number of variables; of each its name, number of dimensions (a
    byte), dimensions, data type (a byte), number of bytes, bytes. Names that stand for others follow.
    """
    place = 0

    def number(kind: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from("<" + kind, whole, place)
        place += struct.calcsize("<" + kind)
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return whole[place - length : place - 1].decode()

    version = number("I")
    kind, _revision = text(), number("I")
    if version < 5 or kind != "WhisperSpec":
        raise SystemExit(f"version {version} of {kind}: only Whisper of version 5 and later is known here")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        yield name, np.frombuffer(whole, dtype, size // np.dtype(dtype).itemsize, place).reshape(shape)
        place += size


def convert(found: dict[str, np.ndarray], folder: Path, seconds: int, destination: Path) -> None:
    """Write the checkpoint: FP16, its names as transformers has them."""
    positions = POSITIONS_PER_SECOND * seconds
    tensors: dict[str, np.ndarray] = {}
    for name, value in found.items():
        if value.ndim == 0 or name == "decoder/alignment_heads":
            continue
        renamed = name
        for pattern, replacement in NAMES:
            renamed = re.sub(pattern, replacement, renamed)
        if renamed == "model.encoder.embed_positions.weight":
            value = value[:positions]
        path, _, last = renamed.rpartition(".")
        parent, _, merged = path.rpartition(".")
        projections = merged.split("+")
        for projection, rows in zip(projections, np.split(value, len(projections)), strict=True):
            # The keys' bias changes no weight of attention: Whisper has none.
            if (projection, last) == ("k_proj", "bias"):
                assert not rows.any()
                continue
            tensors[f"{parent}.{projection}.{last}"] = np.ascontiguousarray(rows)
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    configure(found, folder, positions, destination)


def configure(found: dict[str, np.ndarray], folder: Path, positions: int, destination: Path) -> None:
    """The files beside the weights: configurations of model and generation, of audio's features, the tokenizer's."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    # Files in circulation lack the first pair, which makes the first token behind the bytes: words with "t" fall apart.
    pairs, first = tokenizer["model"]["merges"], next(t for t, i in tokenizer["model"]["vocab"].items() if i == 256)
    if pairs[0] != f"{first[0]} {first[1:]}":
        pairs.insert(0, f"{first[0]} {first[1:]}")
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    vocabulary_size, size = found["decoder/embeddings/weight"].shape
    channels = found["encoder/conv1/weight"].shape[1]
    sides: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        sides[f"{side}_layers"] = sum(
            re.fullmatch(rf"{side}/layer_\d+/ffn/linear_0/bias", name) is not None for name in found
        )
        sides[f"{side}_attention_heads"] = int(found[f"{side}/num_heads"])
        sides[f"{side}_ffn_dim"] = len(found[f"{side}/layer_0/ffn/linear_0/bias"])
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    known = json.loads((folder / "config.json").read_text())
    suppressed = {"suppress_tokens": known["suppress_ids"], "begin_suppress_tokens": known["suppress_ids_begin"]}
    model = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "dtype": "float16",
        "is_encoder_decoder": True, "activation_function": "gelu", "vocab_size": vocabulary_size, "d_model": size,
        "num_mel_bins": channels, "max_source_positions": positions, "num_hidden_layers": sides["encoder_layers"],
        "max_target_positions": len(found["decoder/position_encodings/encodings"]), **sides, **special,
    }  # fmt: skip
    generation = {
        **special, **suppressed, "is_multilingual": True, "no_timestamps_token_id": ids["<|notimestamps|>"],
        "lang_to_id": {token: i for token, i in ids.items() if i in known["lang_ids"]},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "max_length": model["max_target_positions"],
    }  # fmt: skip
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": channels, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400,
        "chunk_length": positions // POSITIONS_PER_SECOND,
    }  # fmt: skip
    words = {
        "tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    }  # fmt: skip
    for name, content in {
        "config": model, "generation_config": generation, "preprocessor_config": features, "tokenizer_config": words
    }.items():  # fmt: skip
        (destination / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (destination / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


if __name__ == "__main__":
    main()
