"""Dense models with other parts than the embedded checkpoint has, against Hugging Face transformers in FP32."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from vllm import SamplingParams

from tests.integration.checkpoints import SIZES, random_model, save
from tests.integration.engine import engine

NEW_TOKENS = 12
MARGIN = 0.1
"""How much the likeliest token must lead in FP32, in natural logarithms, for a BF16 engine to have to agree."""
MODELS = {
    # Biases on q, k and v; one table for embedding and lm_head.
    "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    # q and k are normalised by head; heads are wider than hidden_size / num_attention_heads.
    "qwen3": Qwen3Config(**{**SIZES, "hidden_size": 128}, head_dim=64),
}


def prompts() -> list[list[int]]:
    """Random token ids: one of a block's length, one short, one that is prefilled in pieces."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (16, 5, 150)]


@pytest.mark.parametrize("name", MODELS)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    """Step by step: the chosen token is FP32's where that is sure, and as likely as FP32 says."""
    reference = random_model(MODELS[name])
    directory = save(reference, tmp_path / name)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    with engine(directory, dtype="bfloat16", skip_tokenizer_init=True, max_num_batched_tokens=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)
    rounded = copy.deepcopy(reference).to(torch.bfloat16)
    sure, worst, noise = 0, 0.0, 0.0
    for prompt, output in zip(prompts(), outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        expected = step_logprobs(reference, prompt, tokens)
        in_bf16 = step_logprobs(rounded, prompt, tokens)
        for step, token in enumerate(tokens):
            best, second = expected[step].topk(2).values.tolist()
            if best - second > MARGIN:
                sure += 1
                assert token == int(expected[step].argmax()), f"prompt of {len(prompt)}, step {step}"
            got = output.outputs[0].logprobs[step][token].logprob
            worst = max(worst, abs(got - float(expected[step][token])))
            noise = max(noise, abs(float(in_bf16[step][token] - expected[step][token])))
    # Both round activations to BF16, at other places: the larger of two draws from one distribution.
    assert worst < 2 * noise
    assert noise < 0.1
    # The test means something: most steps were sure ones.
    assert sure > 2 / 3 * NEW_TOKENS * len(outputs)


@torch.no_grad()
def step_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logprobs [len(tokens), vocab] of what follows the prompt and the tokens before each step."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_reference_is_what_it_should_be(name: str) -> None:
    """The parts that these models are here for are there, and are not neutral."""
    config: PretrainedConfig = MODELS[name]
    parameters = dict(random_model(config).named_parameters())
    wanted = "self_attn.q_proj.bias" if name == "qwen2" else "self_attn.q_norm.weight"
    found = [parameter for path, parameter in parameters.items() if path.endswith(wanted)]
    assert len(found) == config.num_hidden_layers
    assert all(parameter.std() > 0.1 for parameter in found)
