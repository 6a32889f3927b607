"""What requests and engines may ask for beside plain generation, on the embedded checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.integration import eagle_head
from tests.integration.engine import MODEL, check_golden, engine, golden, golden_prompts, greedy, metric, score, worker
from vllm_arm_cpu.attention.backend import ArmAttentionImpl


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # A model as small as this one would write white space until it has no tokens left.
    with engine(structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True}) as made:
        yield made


def outputs(llm: LLM, prompt: list[int], **parameters: Any) -> list[Any]:
    """What a request with these sampling parameters gives."""
    params = SamplingParams(**{"max_tokens": 12, **parameters})
    return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding(method: str) -> None:
    """The golden tokens, whatever is drafted; some drafts are right, and all of a draft model that is the model."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        config |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    else:
        config["model"] = str(MODEL)
    with engine(speculative_config=config, max_num_batched_tokens=128) as speculating:
        check_golden(speculating, "short-1", "medium", "shared-prefix-1")
        # Copying its own text: the tokens of an n-gram's continuation are there.
        repeated = golden("medium")[0]["prompt_token_ids"] + golden("medium")[0]["token_ids"]
        greedy(speculating, [repeated + golden("medium")[0]["prompt_token_ids"]], 16)
        drafted = metric(speculating, "vllm:spec_decode_num_draft_tokens")
        accepted = metric(speculating, "vllm:spec_decode_num_accepted_tokens")
        assert drafted > 0 and accepted > 0
        if method == "draft_model":
            # Batches of other shapes may round a tie to another side.
            assert accepted > 0.9 * drafted
        # Through rejection sampling: a seed fixes a request's tokens, alone, again, and beside others.
        count = 12
        params = [
            SamplingParams(max_tokens=count, temperature=0.8, top_p=0.9, seed=5),
            SamplingParams(max_tokens=count, temperature=0),
            SamplingParams(max_tokens=count, temperature=0.8, top_p=0.9, seed=8),
            SamplingParams(max_tokens=count, temperature=1.0),
            SamplingParams(max_tokens=count, temperature=0.7, top_k=5, seed=6),
        ]
        prompts = [golden_prompts(name)[0] for name in ("short-1", "short-2", "short-1", "medium", "shared-prefix-1")]
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        made = speculating.generate(inputs, params, use_tqdm=False)
        together = [list(output.outputs[0].token_ids) for output in made]
        for i in (0, 2, 4):
            alone = speculating.generate([inputs[i]], [params[i]], use_tqdm=False)
            assert list(alone[0].outputs[0].token_ids) == together[i]
        assert [len(tokens) for tokens in together] == [count] * len(params)
        assert together[0] != together[2]


@pytest.mark.slow
def test_sampled_drafts() -> None:
    """Drafts with probabilities: where the draft model is the target, nearly all are accepted at any temperature."""
    config = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
    config["draft_sample_method"] = "probabilistic"
    with engine(speculative_config=config, max_num_batched_tokens=128) as speculating:
        params = [SamplingParams(max_tokens=16, temperature=t, ignore_eos=True) for t in (0.7, 1.0, 1.5, 0.0)]
        inputs: list[Any] = [{"prompt_token_ids": golden_prompts("short-1")[0]}] * len(params)
        made = speculating.generate(inputs, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in made] == [16] * len(params)
        drafted = metric(speculating, "vllm:spec_decode_num_draft_tokens")
        # The two are rounded apart, and batches of other shapes may round otherwise.
        assert metric(speculating, "vllm:spec_decode_num_accepted_tokens") > 0.9 * drafted > 0
        # The target's filters are not the draft model's: some drafts are wrong, all tokens are the target's.
        filtered = SamplingParams(max_tokens=16, temperature=1.5, top_k=1, ignore_eos=True)
        tokens = speculating.generate(inputs[:1], filtered, use_tqdm=False)[0].outputs[0].token_ids
        assert list(tokens) == golden("short-1")[0]["token_ids"][:16]


@pytest.mark.slow
def test_synthetic_acceptance() -> None:
    """Two of three drafts by their rates, whatever they are, for greedy and random requests."""
    config = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
    config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0, 1.0, 0.0]}
    with engine(speculative_config=config, max_num_batched_tokens=128) as speculating:
        params = [SamplingParams(max_tokens=13, temperature=t, ignore_eos=True) for t in (0.0, 0.9)]
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in golden_prompts("short-1", "short-2")]
        made = speculating.generate(inputs, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in made] == [13, 13]
        steps = metric(speculating, "vllm:spec_decode_num_drafts")
        assert metric(speculating, "vllm:spec_decode_num_accepted_tokens") == 2 * steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle(method: str, tmp_path: Path) -> None:
    """The golden tokens, drafted by a head that knows them: nearly all of its drafts are right."""
    names = ("short-1", "medium")
    head = eagle_head.make(method, tmp_path / method, *names)
    config = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    # The longer prompt is prefilled in pieces, by the head, too.
    with engine(speculative_config=config, max_num_batched_tokens=48, max_num_seqs=8) as speculating:
        drafter = worker(speculating).model_runner.drafter.model
        attention = [module for module in drafter.modules() if isinstance(module, Attention)]
        assert [type(module.impl) for module in attention] == [ArmAttentionImpl]
        check_golden(speculating, *names)
        drafted = metric(speculating, "vllm:spec_decode_num_draft_tokens")
        accepted = metric(speculating, "vllm:spec_decode_num_accepted_tokens")
        print(f"{method}: {accepted:.0f} of {drafted:.0f} drafts accepted")
        # Without its attention, the same head's first draft of three is wrong more often than not.
        assert accepted > 0.85 * drafted > 0
        # A text that the head does not know: the target's tokens all the same, and most drafts wrong.
        check_golden(speculating, "short-2")
        # Through rejection sampling, with a seed. How many numbers are drawn depends on the drafts, and these, where
        # the head is not sure, on how the prompt was cut.
        sampled = []
        for _ in range(2):
            speculating.reset_prefix_cache()
            sampled.append(outputs(speculating, golden_prompts("short-1")[0], temperature=0.8, seed=5))
        assert sampled[0][0].token_ids == sampled[1][0].token_ids
        assert len(sampled[0][0].token_ids) == 12


def test_structured_output(llm: LLM) -> None:
    """JSON of a schema, however unlikely a model of stories finds it; a choice, and a regular expression."""
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
    prompt = golden_prompts("short-1")[0]
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=schema))
    answer = json.loads(out.text)
    assert set(answer) == {"age", "kind"}
    assert isinstance(answer["age"], int) and 0 <= answer["age"] <= 99
    assert answer["kind"] in ("cat", "dog")
    (out,) = outputs(llm, prompt, temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert out.text in ("yes", "no")
    (out,) = outputs(llm, prompt, temperature=1, structured_outputs=StructuredOutputsParams(regex=r"[ab]{3}-\d{2}"))
    assert len(out.text) == 6 and out.text[3] == "-" and set(out.text[:3]) <= {"a", "b"} and out.text[4:].isdigit()


def test_beam_search(llm: LLM) -> None:
    """The best of three beams is at least as likely as the greedy continuation, and the first of them."""
    prompt = golden_prompts("short-1")[0]
    (result,) = llm.beam_search(
        [{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    )
    assert len(result.sequences) == 3
    likely = [sequence.cum_logprob for sequence in result.sequences]
    assert likely == sorted(likely, reverse=True)
    assert len({tuple(sequence.tokens) for sequence in result.sequences}) == 3
    (best,) = outputs(llm, prompt, temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    assert likely[0] >= best.cumulative_logprob - 0.05


def test_several_outputs(llm: LLM) -> None:
    """n samples of a request differ, and are the same for the same seed."""
    prompt = golden_prompts("short-1")[0]
    first, again = (outputs(llm, prompt, n=4, temperature=1.0, seed=11) for _ in range(2))
    tokens = [out.token_ids for out in first]
    assert tokens == [out.token_ids for out in again]
    assert len({tuple(ids) for ids in tokens}) > 1


def test_stop(llm: LLM) -> None:
    """Stop strings, stop tokens and a least number of tokens."""
    prompt = golden_prompts("short-1")[0]
    (whole,) = outputs(llm, prompt, temperature=0, max_tokens=16)
    word = whole.text.split()[3]
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=16, stop=[word])
    assert out.finish_reason == "stop" and out.stop_reason == word
    assert out.text == whole.text[: whole.text.index(word)]
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=16, stop=[word], include_stop_str_in_output=True)
    assert out.text.endswith(word)
    stop = whole.token_ids[4]
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=16, stop_token_ids=[stop])
    assert list(out.token_ids) == list(whole.token_ids[: list(whole.token_ids).index(stop) + 1])
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=16, stop_token_ids=[stop], min_tokens=8)
    assert len(out.token_ids) >= 8


def test_choice_of_tokens(llm: LLM) -> None:
    """min-p, penalties, biases and bad words change what is chosen as they say."""
    prompt = golden_prompts("short-1")[0]
    (likeliest,) = outputs(llm, prompt, temperature=0)
    (out,) = outputs(llm, prompt, temperature=1.0, min_p=1.0, seed=2)
    assert out.token_ids == likeliest.token_ids
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        (out,) = outputs(llm, prompt, temperature=0, max_tokens=24, ignore_eos=True, **penalty)
        (plain,) = outputs(llm, prompt, temperature=0, max_tokens=24, ignore_eos=True)
        assert len(set(out.token_ids)) > len(set(plain.token_ids)), penalty
    first = likeliest.token_ids[0]
    (out,) = outputs(llm, prompt, temperature=0, max_tokens=1, logit_bias={first: -100})
    assert out.token_ids[0] != first
    (out,) = outputs(llm, prompt, temperature=1.0, max_tokens=3, allowed_token_ids=[5, 7])
    assert set(out.token_ids) <= {5, 7}


def test_logprobs(llm: LLM) -> None:
    """The likeliest come first, probabilities add up, and a prompt's tokens are as likely as when they are chosen."""
    prompt = golden_prompts("short-1")[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (out,) = result.outputs
    chosen = []
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entry) == 5
        values = sorted((logprob.logprob for logprob in entry.values()), reverse=True)
        assert entry[token].rank == 1 and entry[token].logprob == values[0]
        assert sum(2.718281828**value for value in values) <= 1.0001
        chosen.append(values[0])
    again = score(llm, prompt + list(out.token_ids))[len(prompt) - 1 :]
    assert again == pytest.approx(chosen, abs=0.05)


@pytest.mark.parametrize(
    "arguments,words",
    [
        ({"enable_sleep_mode": True}, "Sleep mode is not supported"),
        ({"kv_offloading_size": 1.0}, "kv-offloading-size 1.0 means nothing on a CPU"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "OffloadingConnector means nothing on a CPU",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str) -> None:
    """What makes sense with a GPU's memory only, before anything is loaded."""
    with pytest.raises(ValueError, match=words), engine(**arguments):
        pass
