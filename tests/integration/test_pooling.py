"""Models that score instead of writing, against Hugging Face transformers in FP32 on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.integration import pooling_models
from tests.integration.engine import engine, worker
from tests.integration.pooling_models import DOCUMENTS, QUERY
from vllm_arm_cpu.layers import decoder

MODELS: dict[str, tuple[Callable[[Path], PreTrainedModel], dict[str, Any]]] = {
    "cross-encoder": (pooling_models.make_cross_encoder, {}),
    "generative": (pooling_models.make_generative_reranker, {"hf_overrides": pooling_models.RERANKER_OVERRIDES}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype, limit", [
    ("cross-encoder", "bfloat16", 0.05), ("cross-encoder", "float32", 1e-4),
    ("generative", "bfloat16", 0.05), ("generative", "float32", 1e-4),
])  # fmt: skip
def test_scores(name: str, dtype: str, limit: float, tmp_path: Path) -> None:
    """Every document's, each as it is and in one batch with the others."""
    make, settings = MODELS[name]
    reference = make(tmp_path / name)
    expected = pooling_models.scores(reference, tmp_path / name, QUERY, DOCUMENTS)
    # Scores that are all alike would compare nothing.
    assert expected.std() > 0.1
    with engine(tmp_path / name, runner="pooling", dtype=dtype, **settings) as llm:
        layers = [
            layer for segment in decoder.segments(worker(llm).model_runner.get_model()) for layer in segment.layers
        ]
        assert len(layers) == (0 if name == "cross-encoder" else 3)
        together = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        alone = llm.score(QUERY, DOCUMENTS[2], use_tqdm=False)[0].outputs.score
    error = (torch.tensor(together) - expected).abs().max()
    print(f"{name} in {dtype}: scores are off by {error:.2e} at most; they are {[round(x, 3) for x in together]}")
    assert error < limit
    assert abs(alone - float(expected[2])) < limit
