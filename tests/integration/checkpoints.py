"""Tiny checkpoints with random weights, made on the spot, for models that the embedded one does not stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from tests.integration.zoo import SIZES

__all__ = ["SIZES", "llama_config_only", "random_model", "randomize", "save"]


def random_model(
    config: PretrainedConfig, seed: int = 0, plus_one: bool = False, head_scale: float = 1.0, router_scale: float = 1.0
) -> PreTrainedModel:
    """A model in FP32 whose weights are BF16 numbers; what is said of :func:`randomize` goes for it."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    return randomize(model, seed, plus_one, head_scale, router_scale)


def randomize(
    model: PreTrainedModel, seed: int = 0, plus_one: bool = False, head_scale: float = 1.0, router_scale: float = 1.0
) -> PreTrainedModel:
    """Fill a model in FP32 with BF16 numbers.

    Nothing is neutral: biases, norms, sinks and correction terms initialised
    to 0 or 1 would not show when an engine leaves them out. The logits spread
    over a few units, so that most steps have one clearly likeliest token.

    Args:
        plus_one: norms multiply by 1 + weight, as Gemma's.
        head_scale: of lm_head's weights, for models that divide their logits.
        router_scale: of routers' weights: the larger, the more seldom rounding changes which experts are chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    # These have experts' weights as [experts, inputs, outputs].
    inputs_first = type(model).__name__ in ("GptOssForCausalLM", "Llama4ForCausalLM")
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *_stored_buffers(model)):
            last = name.rpartition(".")[2]
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and last != "bias":
                # The gated norm of recurrent layers is an ordinary one.
                value = 0.2 * noise if plus_one and "linear_attn" not in name else 1 + 0.2 * noise
            elif last == "A_log":
                value = torch.log(1 + noise.abs())
            elif last.endswith("bias") or last == "sinks":
                value = 0.5 * noise
            elif "embed_tokens" in name:
                value = 0.15 * noise
            elif "lm_head" in name:
                value = 0.15 * head_scale * noise
            elif inputs_first and parameter.ndim == 3:
                value = noise * parameter.shape[-2] ** -0.5
            else:
                value = noise * parameter.shape[-1] ** -0.5
            if parameter.ndim == 2 and (".router." in name or name.endswith("mlp.gate.weight")):
                value = router_scale * value
            parameter.copy_(value.to(torch.bfloat16))
    return model


def _stored_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint has, such as what corrects a router's choice."""
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored and buffer.is_floating_point()]


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Write a BF16 checkpoint without a tokenizer; the model itself keeps its FP32 parameters."""
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(directory, state_dict=state)
    return directory


def for_three_ranks(source: Path, directory: Path) -> Path:
    """The embedded checkpoint with sizes that three ranks can share, and the same results.

    A third key head with its queries, intermediate columns and tokens are added, all of zeros. As a Mistral, which is
    the same model: transformers wants a Llama's hidden size to be a multiple of its heads.
    """
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rows = {
        "q_proj": heads // kv_heads * (kv_heads + 1) * size,
        "k_proj": (kv_heads + 1) * size,
        "v_proj": (kv_heads + 1) * size,
        "gate_proj": 576,
        "up_proj": 576,
        "embed_tokens": 2112,
    }
    columns = {"o_proj": rows["q_proj"], "down_proj": 576}
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.split(".")[-2]
        larger = tensor.new_zeros(rows.get(layer, tensor.shape[0]), *(columns.get(layer, n) for n in tensor.shape[1:]))
        larger[tuple(slice(n) for n in tensor.shape)] = tensor
        state[name] = larger
    shutil.copytree(source, directory)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    config |= {"num_attention_heads": rows["q_proj"] // size, "num_key_value_heads": kv_heads + 1}
    config |= {"intermediate_size": rows["gate_proj"], "vocab_size": rows["embed_tokens"]}
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def llama_config_only(directory: Path, **changes: Any) -> Path:
    """A Llama checkpoint without weights: whoever gets as far as loading them says so."""
    config = LlamaConfig(**{**SIZES, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **changes})
    config.save_pretrained(directory)
    return directory
