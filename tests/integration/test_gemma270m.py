"""A real language model, Gemma 3 270M: it answers, and is as perplexed by a text as FP32 of the same precision is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.engine import engine, prompt_logprobs, worker
from tests.integration.gemma270m import ANSWERS, FOLDER, QUESTIONS, REFERENCE, token_ids, tokenizer
from tests.integration.quantized import script
from vllm_arm_cpu.layers.linear import PackedLinear
from vllm_arm_cpu.quantization.w4a8 import Int4Linear, KleidiAILinear
from vllm_arm_cpu.quantization.w8a8 import Int8Linear


# In BF16 a quarter of an hour is not enough on busy emulated cores.
@pytest.mark.timeout(3000)
@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/test.sh slow makes build/gemma3-270m of a package on PyPI")
@pytest.mark.parametrize(
    "scheme,environ,kind",
    [
        ("bf16", {}, PackedLinear),
        ("w8a8", {"VAC_LM_HEAD": "int8"}, Int8Linear),
        ("w4a8-group32", {"VAC_LM_HEAD": "int8", "VAC_INT4_KERNEL": "vac"}, Int4Linear),
        ("w4a8-packed-group128", {"VAC_LM_HEAD": "int8", "VAC_INT4_KERNEL": "kleidiai"}, KleidiAILinear),
    ],
)
def test_gemma(scheme: str, environ: dict[str, str], kind: type, tmp_path: Path) -> None:
    """The figures of docs/quantization.md."""
    model = FOLDER if scheme == "bf16" else script().quantize_checkpoint(FOLDER, tmp_path / "model", scheme)
    ids = token_ids()
    prompts: list[Any] = [
        {"prompt_token_ids": ids},
        *({"prompt_token_ids": tokenizer().encode(text).ids} for text in QUESTIONS),
    ]
    answering = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    reading = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}
    with engine(model, environ, dtype="bfloat16", **settings) as llm:
        named = worker(llm).model_runner.get_model().named_modules()
        linears = [module.cpu_linear for name, module in named if name.endswith("_proj")]
        assert len(linears) == 18 * 4 and {type(linear) for linear in linears} == {kind}
        read, *answers = llm.generate(prompts, [reading] + [answering] * len(QUESTIONS), use_tqdm=False)
    likely = prompt_logprobs(read)
    perplexity = math.exp(-sum(likely) / len(likely))
    said = [tokenizer().decode(list(answer.outputs[0].token_ids)) for answer in answers]
    expected, allowed = REFERENCE[scheme]
    print(
        f"Gemma 3 270M, {scheme} {environ}: perplexity of {len(ids)} tokens {perplexity:.3f}, FP32 with the same "
        f"weights and rounding {expected:.2f}, FP32 {REFERENCE['bf16'][0]:.3f}; says {said}"
    )
    assert perplexity == pytest.approx(expected, rel=allowed)
    known = [text.startswith(answers) for text, answers in zip(said, ANSWERS[scheme], strict=True)]
    # Where activations are rounded one may fall the other way: the reference's logprobs differ by 0.3 between draws.
    assert known.count(False) <= (0 if scheme == "bf16" else 1), said
