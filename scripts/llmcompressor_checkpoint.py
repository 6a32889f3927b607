#!/usr/bin/env python3
"""Writes small int4 checkpoints with LLM Compressor, so that what the tests load is that tool's format and not ours.

    python3 -m venv venv && venv/bin/pip install llmcompressor==0.14.0.1
    venv/bin/python scripts/llmcompressor_checkpoint.py tests/data/llmcompressor

A Llama of random weights, one block, is quantized by GPTQ on random tokens, once for each of ``SCHEMES``. The tool
wants other versions of torch, transformers and compressed-tensors than vLLM does: it has a place of its own, on any
machine, and the checkpoints are kept.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SCHEMES = {
    "w4a16": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64},
    "w4a16-asymmetric": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
    "w4a8": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
}
"""Folder -> how weights are quantized."""

ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Of ``w4a8``."""

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path, help="folder to write the checkpoints into")
    destination = parser.parse_args().destination
    for name, weights in SCHEMES.items():
        write(destination / name, weights, ACTIVATIONS if name == "w4a8" else None)


def write(directory: Path, weights: dict[str, object], activations: dict[str, object] | None) -> None:
    """One checkpoint: configuration and tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    tokens = torch.randint(2, CONFIG.vocab_size, (32, 64)).tolist()
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * 64] * len(tokens)})
    # Tokens are given, but it insists on a tokenizer, and on a model out of a folder.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, "<unk>")), pad_token="<unk>")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/original")
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/original", dtype="auto")
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=data,
            recipe=GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"], actorder=None),
            max_seq_length=64,
            num_calibration_samples=len(tokens),
        )
        model.save_pretrained(f"{folder}/quantized", save_compressed=True)
        directory.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(Path(folder) / "quantized" / file, directory / file)


if __name__ == "__main__":
    main()
