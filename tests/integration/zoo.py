"""Tiny checkpoints in the architectures that people serve: configurations as published, sizes cut, weights random.

Every entry says on which path its parts run. ``docs/models.md`` has the table
that :func:`table` makes of that; a test compares the two. Nothing here needs
torch until a model is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        family: models with this architecture, for the table.
        config: makes the configuration, with transformers' class.
        parts: what of it the test means, for the table.
        modules_because: why its decoder layers are no op lists (part of the reason), or None where all of them are.
        experts: whether it has experts.
        recurrent: its layers that keep a state, which have kernels of ours.
        needs_upstream: the layers that only ``vllm._C`` has kernels for; without it they are refused with their name.
        latent: attention over latents: vLLM's kernels where ``vllm._C`` is there, else ours over whole heads.
        slow: not part of the normal suite.
        plus_one: norms multiply by 1 + weight, as Gemma's.
        head_scale: of lm_head's weights, for models that divide their logits.
        quantize: changes the checkpoint that was written, and the reference's weights to those it stands for.
    """

    family: str
    config: Callable[[], PretrainedConfig]
    parts: str
    modules_because: str | None = None
    experts: bool = False
    recurrent: str = ""
    needs_upstream: str = ""
    latent: bool = False
    slow: bool = False
    plus_one: bool = False
    head_scale: float = 1.0
    quantize: Callable[[PreTrainedModel, Path], None] | None = None


def _make(name: str, **settings: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        import transformers

        config: PretrainedConfig = getattr(transformers, name)(**{**SIZES, **settings})
        return config

    return make


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def write_mxfp4(model: PreTrainedModel, directory: Path) -> None:
    """gpt-oss's experts in MXFP4, as its checkpoints have them; the model gets the values that these stand for."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for path, parameter in model.named_parameters():
        if not path.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        # [experts, inputs, outputs] -> rows of inputs in blocks of 32.
        blocks = parameter.detach().transpose(1, 2).unflatten(-1, (-1, 32))
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True) / 4))
        scaled = blocks / 2**exponent
        code = (scaled.abs().unsqueeze(-1) - grid).abs().argmin(-1)
        with torch.no_grad():
            parameter.copy_((grid[code] * scaled.sign() * 2**exponent).flatten(-2).transpose(1, 2))
        code = (code + 8 * (scaled < 0)).to(torch.uint8)
        del tensors[path]
        tensors[f"{path}_blocks"] = (code[..., 0::2] | code[..., 1::2] << 4).contiguous()
        tensors[f"{path}_scales"] = (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


ZOO: dict[str, Entry] = {
    "llama3": Entry(
        "Llama 3, 3.1, 3.2, 3.3",
        _make("LlamaConfig", rope_parameters=_LLAMA3_ROPE),
        parts="rotary embedding scaled as Llama 3.1's",
        slow=True,
    ),
    "llama4": Entry(
        "Llama 4 (text)",
        _make(
            "Llama4TextConfig", num_hidden_layers=4, head_dim=64, intermediate_size=128, intermediate_size_mlp=384,
            num_local_experts=4, interleave_moe_layer_step=2, attention_chunk_size=48, floor_scale=16,
            rope_parameters={**_LLAMA3_ROPE, "factor": 16.0},
        ),
        parts="experts, a shared one, attention in chunks, layers without positions, scaled queries",
        modules_because="is not of Llama's family",
        experts=True,
        slow=True,
    ),
    "mistral": Entry(
        "Mistral 7B v0.3, Nemo, Small",
        _make("MistralConfig", head_dim=128, sliding_window=None),
        parts="heads that are wider than hidden size / heads",
        slow=True,
    ),
    "ministral3": Entry(
        "Ministral 3",
        _make(
            "Ministral3Config", head_dim=128,
            rope_parameters={
                **YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
            # Where vLLM looks for it: Mistral's own format of the checkpoint.
            llama_4_scaling={"original_max_position_embeddings": 64, "beta": 0.1},
        ),
        parts="YaRN, queries scaled by position",
        modules_because="scaled queries",
        slow=True,
    ),
    "qwen2.5": Entry(
        "Qwen2, Qwen2.5",
        _make("Qwen2Config", tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        parts="biases on q, k and v, one table for embedding and lm_head",
        slow=True,
    ),
    "qwen3": Entry(
        "Qwen3",
        _make("Qwen3Config", hidden_size=128, head_dim=64),
        parts="q and k normalised by head",
    ),
    "qwen3-moe": Entry(
        "Qwen3-MoE",
        _make(
            "Qwen3MoeConfig", head_dim=64, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, decoder_sparse_step=1,
        ),
        parts="experts, q and k normalised by head",
        experts=True,
    ),
    "mixtral": Entry(
        "Mixtral",
        _make("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, intermediate_size=128, sliding_window=None),
        parts="experts",
        experts=True,
        slow=True,
    ),
    "qwen3.5": Entry(
        "Qwen3.5, Qwen3.6, Qwen3-Next",
        _make(
            "Qwen3_5TextConfig", num_hidden_layers=4, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=64, linear_value_head_dim=64,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2]},
        ),
        plus_one=True,
        parts="gated delta nets, gated attention, rotary embedding of a part of a head",
        modules_because="is not of Llama's family",
        recurrent="gated delta nets",
    ),
    "gemma3": Entry(
        "Gemma 3 (text)",
        _make(
            "Gemma3TextConfig", num_hidden_layers=3, head_dim=64, query_pre_attn_scalar=64, sliding_window=32,
            layer_types=["sliding_attention"] * 2 + ["full_attention"], tie_word_embeddings=True,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        ),
        plus_one=True,
        parts="sliding windows and global layers, norms before and behind, two rotary embeddings",
    ),
    "phi3": Entry(
        "Phi-3, Phi-4",
        _make("Phi3Config", sliding_window=None, pad_token_id=0),
        parts="weights of q, k and v in one, gate and up in one",
        slow=True,
    ),
    "phi4-mini": Entry(
        "Phi-4-mini, Phi-3.5-mini",
        _make(
            "Phi3Config", pad_token_id=0, tie_word_embeddings=True, original_max_position_embeddings=4,
            # transformers takes the long factors for sequences beyond this length, vLLM for models that allow them.
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.05 * i for i in range(24)], "long_factor": [1.0 + 0.5 * i for i in range(24)],
                "original_max_position_embeddings": 4,
            },
        ),
        parts="rotary embedding of a part of a head, long and short factors",
        slow=True,
    ),
    "granite": Entry(
        "Granite 3",
        _make(
            "GraniteConfig", embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
            attention_multiplier=1 / 64,
        ),
        head_scale=16.0,
        parts="multipliers of embedding, residual, attention and logits",
        modules_because="is not of Llama's family",
        slow=True,
    ),
    "granite4": Entry(
        "Granite 4 (hybrid)",
        _make(
            "GraniteMoeHybridConfig", layer_types=["mamba", "attention"], num_local_experts=0, num_experts_per_tok=0,
            shared_intermediate_size=384, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_n_groups=1,
            mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64, position_embedding_type="nope",
            embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=1 / 64,
        ),
        parts="Mamba 2 layers, attention without positions",
        modules_because="is not of Llama's family",
        needs_upstream="Mamba 2",
        slow=True,
        head_scale=8.0,
    ),
    "deepseek-v2": Entry(
        "DeepSeek-V2(-Lite)",
        _make(
            "DeepseekV2Config", q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2,
            moe_intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, topk_method="greedy",
            n_group=1, topk_group=1,
        ),
        parts="latent attention without a latent query, experts, shared experts",
        modules_because="is not of Llama's family",
        experts=True,
        latent=True,
        slow=True,
    ),
    "deepseek-v3": Entry(
        "DeepSeek-V3, R1, Kimi K2",
        _make(
            "DeepseekV3Config", q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=4,
            moe_intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, n_group=4, topk_group=2,
            topk_method="noaux_tc", scoring_func="sigmoid",
            rope_parameters={
                **YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
            },
        ),
        parts="latent attention, YaRN, experts in groups with a correction, shared experts",
        modules_because="is not of Llama's family",
        experts=True,
        latent=True,
    ),
    "gpt-oss": Entry(
        "gpt-oss (BF16)",
        _make(
            "GptOssConfig", head_dim=64, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=32, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                **YARN, "rope_theta": 150000.0, "truncate": False, "original_max_position_embeddings": 64,
            },
        ),
        parts="sinks, sliding windows, experts with biases and clamped gates, YaRN",
        modules_because="is not of Llama's family",
        experts=True,
        slow=True,
    ),
}  # fmt: skip
ZOO["gpt-oss-mxfp4"] = replace(
    ZOO["gpt-oss"],
    family="gpt-oss",
    parts="as above, with MXFP4 experts (run as BF16)",
    slow=False,
    quantize=write_mxfp4,
)


def make(name: str, directory: Path) -> PreTrainedModel:
    """Write the BF16 checkpoint of an entry; the model in FP32 with these weights."""
    from tests.integration.checkpoints import random_model, save

    entry = ZOO[name]
    model = random_model(entry.config(), plus_one=entry.plus_one, head_scale=entry.head_scale, router_scale=8.0)
    save(model, directory)
    if entry.quantize is not None:
        entry.quantize(model, directory)
    return model


def table() -> str:
    """What runs on which path, as Markdown."""
    lines = [
        "| Models | Decoder layers | Attention | Experts | Without `vllm._C` | What the test has |",
        "|---|---|---|---|---|---|",
    ]
    for entry in ZOO.values():
        attention, without = "ours", "the same"
        if entry.latent:
            attention, without = "vLLM's, over latents", "ours, over whole heads"
        if entry.recurrent:
            attention = f"ours; {entry.recurrent}: ours"
        if entry.needs_upstream:
            attention = f"ours; {entry.needs_upstream} layers: vLLM's"
            without = f"refused: {entry.needs_upstream} layers have no kernel"
        decoder = "one op list" if entry.modules_because is None else "modules"
        experts = "ours" if entry.experts else "-"
        lines.append(f"| {entry.family} | {decoder} | {attention} | {experts} | {without} | {entry.parts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
