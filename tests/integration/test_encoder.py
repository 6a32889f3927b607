"""Encoders: attention over whole sequences in both directions, against Hugging Face transformers in FP32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, ModernBertConfig, PretrainedConfig, PreTrainedModel
from vllm.config import PoolerConfig

from tests.integration.engine import MODEL, engine, worker

SIZES = {
    # That of the embedded checkpoint, whose tokenizer stands beside the model.
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**SIZES),
    # Two of three layers see 24 tokens to either side.
    "modernbert": ModernBertConfig(
        **SIZES, local_attention=48, global_attn_every_n_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    ),
}  # fmt: skip
LENGTHS = (16, 5, 150, 1)


def random_encoder(config: PretrainedConfig, kind: Any = AutoModel) -> PreTrainedModel:
    """An encoder in FP32 whose weights are BF16 numbers and whose biases are not 0; kind: AutoModel or a sibling."""
    generator = torch.Generator().manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                value = 1 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.3 * noise
            elif "embeddings" in name:
                value = 0.5 * noise
            else:
                # Attention that looks at few tokens, not evenly at all.
                value = 2 * noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value.to(torch.bfloat16))
    return model


@pytest.mark.parametrize("name, dtype, limit", [("bert", "bfloat16", 0.05), ("modernbert", "float32", 1e-4)])
def test_against_transformers(name: str, dtype: str, limit: float, tmp_path: Path) -> None:
    """Hidden states of every token of a ragged batch."""
    reference = random_encoder(MODELS[name])
    reference.config.architectures = [type(reference).__name__]
    reference.save_pretrained(tmp_path / name)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.no_grad():
        expected = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    scale = torch.cat(expected).std()
    pooler = PoolerConfig(task="token_embed", use_activation=False)
    with engine(tmp_path / name, dtype=dtype, runner="pooling", pooler_config=pooler) as llm:
        context = worker(llm).model_runner.compilation_config.static_forward_context
        assert {type(layer.impl).__name__ for layer in context.values()} == {"ArmAttentionImpl"}
        outputs = llm.encode([{"prompt_token_ids": ids} for ids in prompts], pooling_task="token_embed", use_tqdm=False)
    for ids, output, hidden in zip(prompts, outputs, expected, strict=True):
        got = output.outputs.data.float()
        assert got.shape == hidden.shape
        error = (got - hidden).square().mean().sqrt() / scale
        assert error < limit, f"{dtype}, prompt of {len(ids)}: {error}"


def test_window_matters() -> None:
    """The reference with windows is not the one without: an engine that ignored them would be seen."""
    config = MODELS["modernbert"]
    ids = torch.arange(3, 153)[None]
    with torch.no_grad():
        windowed = random_encoder(config)(ids).last_hidden_state
        whole = random_encoder(ModernBertConfig(**{**config.to_dict(), "local_attention": 1000}))(ids).last_hidden_state
    assert (windowed - whole).square().mean().sqrt() > 0.1 * whole.std()
