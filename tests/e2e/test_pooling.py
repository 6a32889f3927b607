"""Vectors and scores over HTTP: a server with an embedding model, and one with a reranker, both as users start them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.server import MODEL_NAME, HttpError, Server
from tests.integration import pooling_models
from tests.integration.pooling_models import DOCUMENTS, QUERY

# Two more servers, beside the two that all others share.
pytestmark = pytest.mark.slow

LIMIT = 0.05
"""Of BF16 through three layers, for numbers between 0 and 1."""


@dataclass
class Served:
    """A server and what it should say."""

    server: Server
    reference: PreTrainedModel
    directory: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """The embedding model and the reranker."""
    folder = tmp_path_factory.mktemp("pooling")
    environ = {name: "" for name in ("LD_PRELOAD", "VAC_PRELOAD") if name in os.environ}
    made = []
    for name in ("embedder", "cross_encoder"):
        reference = getattr(pooling_models, f"make_{name}")(folder / name)
        made.append(Served(Server(folder / f"{name}-log", environ, model=folder / name), reference, folder / name))
    try:
        for one in made:
            one.server.start()
        for one in made:
            print(f"ready after {one.server.wait_until_ready(START_TIMEOUT):.0f} s")
        yield made[0], made[1]
        for one in made:
            one.server.terminate()
        for one in made:
            assert one.server.wait(END_TIMEOUT) == 0, one.server.log_tail()
    finally:
        for one in made:
            one.server.kill()


def test_embeddings(served: tuple[Served, Served]) -> None:
    """Those of transformers, through the official client, which asks for them in base64; and as plain numbers."""
    embedder = served[0]
    expected = pooling_models.vectors(embedder.reference, embedder.directory, DOCUMENTS)
    assert (expected @ expected.T).fill_diagonal_(0).max() < 0.98, "texts that are all alike compare nothing"
    client = openai.OpenAI(base_url=f"{embedder.server.url}/v1", api_key="none", timeout=240, max_retries=0)
    answer = client.embeddings.create(model=MODEL_NAME, input=DOCUMENTS)
    assert [entry.index for entry in answer.data] == list(range(len(DOCUMENTS)))
    got = torch.tensor([entry.embedding for entry in answer.data])
    print(f"vectors are off by {float((got - expected).abs().max()):.2e} at most")
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < LIMIT and ((got * expected).sum(dim=1) > 0.99).all()
    assert answer.usage.prompt_tokens > len(DOCUMENTS)
    plain = embedder.server.post("/v1/embeddings", model=MODEL_NAME, input=DOCUMENTS[1], encoding_format="float")
    assert torch.tensor(plain["data"][0]["embedding"]) @ expected[1] > 0.99
    with pytest.raises(openai.BadRequestError, match="512"):
        client.embeddings.create(model=MODEL_NAME, input=[5] * 600)
    # Embedding models score by the cosine of two vectors.
    scored = embedder.server.post("/score", model=MODEL_NAME, text_1=DOCUMENTS[0], text_2=DOCUMENTS[1:])
    cosines = expected[1:] @ expected[0]
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(cosines.tolist(), abs=LIMIT)


def test_scores(served: tuple[Served, Served]) -> None:
    """A reranker's, of pairs and of a query's documents, best first."""
    reranker = served[1]
    expected = pooling_models.scores(reranker.reference, reranker.directory, QUERY, DOCUMENTS)
    assert expected.std() > 0.1, "scores that are all alike compare nothing"
    answer = reranker.server.post("/score", model=MODEL_NAME, text_1=QUERY, text_2=DOCUMENTS)
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected.tolist(), abs=LIMIT)
    ranked = reranker.server.post("/rerank", model=MODEL_NAME, query=QUERY, documents=DOCUMENTS)["results"]
    found = [entry["relevance_score"] for entry in ranked]
    print(f"scores {[round(score, 3) for score in found]}, those of FP32 {sorted(expected.tolist(), reverse=True)}")
    assert found == sorted(found, reverse=True)
    assert sorted(entry["index"] for entry in ranked) == list(range(len(DOCUMENTS)))
    for entry in ranked:
        assert entry["document"]["text"] == DOCUMENTS[entry["index"]]
        assert entry["relevance_score"] == pytest.approx(float(expected[entry["index"]]), abs=LIMIT)
    best = reranker.server.post("/v1/rerank", model=MODEL_NAME, query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    assert [entry["index"] for entry in best] == [entry["index"] for entry in ranked[:2]]
    with pytest.raises(HttpError) as error:
        reranker.server.post("/v1/completions", model=MODEL_NAME, prompt="And", max_tokens=1)
    assert 400 <= error.value.status < 500
