"""LoRA adapters on packed layers: as if the adapter had been merged into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from vllm import SamplingParams
from vllm.lora.ops.torch_ops import bgmv_shrink
from vllm.lora.request import LoRARequest

from tests.integration.engine import MODEL, check_golden, engine, golden_prompts
from tests.integration.test_linear import FEW, model_of
from vllm_arm_cpu.layers.lora import expand, group_rows, shrink

# Models are merged and run with transformers, too.
pytestmark = pytest.mark.slow

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW_TOKENS = 8

# Of the logits: BF16 has 8 significant bits, and the activations are rounded a dozen times.
TOLERANCE = 0.06


def make_adapter(directory: Path, seed: int) -> tuple[LoRARequest, LlamaForCausalLM]:
    """An adapter in PEFT's format, and the FP32 model with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir()
    reference = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tensors = {}
    for name, module in reference.named_modules():
        if name.rsplit(".", 1)[-1] not in TARGETS:
            continue
        n, k = module.weight.shape
        # The engine holds adapters in BF16: let these be exact in it.
        a = (torch.randn(RANK, k, generator=generator) / k**0.5).to(torch.bfloat16)
        b = (torch.randn(n, RANK, generator=generator) * 0.05).to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        module.weight.data += ALPHA / RANK * (b.float() @ a.float())
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(MODEL),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, seed, str(directory)), reference


def assert_as(reference: LlamaForCausalLM, output: object) -> None:
    """Logprobs, the prompt's too if there are any, are the reference's, and so are the tokens where it is sure."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]  # type: ignore[attr-defined]
    tokens = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    entries = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]  # type: ignore[attr-defined]
    tokens = tokens[-len(entries) :]
    expected = logits.log_softmax(-1)[range(len(logits) - 1 - len(entries), len(logits) - 1), tokens]
    got = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
    assert (got - expected).abs().mean() < TOLERANCE / 2
    assert (got - expected).abs().max() < 4 * TOLERANCE
    for row, token in zip(logits[len(prompt) - 1 :], completion.token_ids, strict=False):
        best = row.topk(2)
        assert token == best.indices[0] or best.values[0] - best.values[1] < 2 * TOLERANCE


def test_rows_of_adapters() -> None:
    """Each row gets its adapter's product, rows without one none; the columns around the slice stay."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.tensor([0, 0, -1, 1, 0, -1])
    groups = group_rows(indices)
    a = torch.randn(2, 1, 4, 16, generator=generator)
    b = torch.randn(2, 1, 10, 4, generator=generator)
    x, y = torch.randn(6, 16, generator=generator), torch.randn(6, 20, generator=generator)
    expected = y.clone()
    for i, slot in enumerate(indices.tolist()):
        if slot >= 0:
            expected[i, 5:15] += 2 * x[i] @ a[slot, 0].T @ b[slot, 0].T
    shrunk = torch.zeros(6, 4)
    shrink(shrunk, x, a, groups, 2.0)
    assert shrunk[indices == -1].eq(0).all()
    expand(y[:, :15], shrunk, b, groups, 5, add=True)
    torch.testing.assert_close(y, expected)

    # Why these are needed: without an adapter, vLLM's operators take the last slot's.
    bgmv_shrink(x, a, shrunk, indices)
    assert shrunk[indices == -1].abs().min() > 0, "vLLM respects -1 now: layers/lora.py may go"


# vLLM's wrapper cannot give logprobs of several prompts at once.
ANSWER = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
TWO_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "max_num_seqs": 8}


@pytest.mark.parametrize("kernel", ["vac", "torch"])
def test_two_adapters(tmp_path: Path, kernel: str) -> None:
    (one, reference_one), (two, reference_two) = (make_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompts = [{"prompt_token_ids": ids} for ids in golden_prompts()[:3]]
    with engine(environ={"VAC_LINEAR": kernel}, **TWO_ADAPTERS) as llm:
        wrappers = {type(getattr(m, "punica_wrapper", None)).__name__ for m in model_of(llm).modules()}
        assert "ArmPunicaWrapper" in wrappers
        check_golden(llm, *FEW)
        for request, reference in ((one, reference_one), (two, reference_two)):
            for output in llm.generate(prompts, ANSWER, use_tqdm=False, lora_request=request):
                assert_as(reference, output)
        # Both adapters and none, in one batch.
        requests = [one, two, None]
        outputs = llm.generate(prompts, ANSWER, use_tqdm=False, lora_request=requests)
        for output, reference in zip(outputs, (reference_one, reference_two, base), strict=True):
            assert_as(reference, output)
        # The adapters do something: under another's reference the logprobs are wrong.
        with pytest.raises(AssertionError):
            assert_as(reference_two, outputs[0])
        check_golden(llm, *FEW)


def wrapper_of(worker: Any) -> str:
    """What multiplies by adapters on a rank; runs in its process."""
    wrappers = {
        type(module.punica_wrapper).__name__
        for module in worker.model_runner.model.modules()
        if hasattr(module, "punica_wrapper")
    }
    return ", ".join(sorted(wrappers))


def test_two_adapters_on_two_ranks(tmp_path: Path) -> None:
    """Divided over ranks as the layers are, in one batch: the tokens of one rank, as likely as FP32 says."""
    (one, reference_one), (two, reference_two) = (make_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompts = [{"prompt_token_ids": ids} for ids in golden_prompts()[:3]]
    references = (reference_one, reference_two, base, base, reference_one, reference_two)
    tokens = []
    for ranks in (1, 2):
        with engine(environ={"VAC_LINEAR": "vac"}, tensor_parallel_size=ranks, **TWO_ADAPTERS) as llm:
            assert llm.collective_rpc(wrapper_of) == ["ArmPunicaWrapper"] * ranks
            outputs = llm.generate(prompts, ANSWER, use_tqdm=False, lora_request=[one, two, None])
            for output, reference in zip(outputs, (reference_one, reference_two, base), strict=True):
                assert_as(reference, output)
            # The other way round: each adapter for another request.
            swapped = llm.generate(prompts, ANSWER, use_tqdm=False, lora_request=[None, one, two])
            for output, reference in zip(swapped, (base, reference_one, reference_two), strict=True):
                assert_as(reference, output)
            tokens.append([list(output.outputs[0].token_ids) for output in (*outputs, *swapped)])
            check_golden(llm, *FEW)
    # Sums of partial results round otherwise: the two may part where FP32 is not sure, and nowhere else.
    for reference, prompt, alone, divided in zip(references, prompts * 2, *tokens, strict=True):
        common = next((i for i in range(NEW_TOKENS) if alone[i] != divided[i]), None)
        if common is not None:
            with torch.no_grad():
                logits = reference(torch.tensor([prompt["prompt_token_ids"] + alone[:common]])).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < 2 * TOLERANCE, (alone, divided)


def test_reload_under_an_adapter(tmp_path: Path) -> None:
    """Packing again beneath the LoRA wrappers."""
    one, reference = make_adapter(tmp_path / "one", 1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": golden_prompts()[0]}]
    settings = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
    with engine(environ={"VAC_LINEAR": "vac"}, **settings) as llm:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(MODEL / "model.safetensors").items()}
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(zeros.items())})
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(MODEL)})
        llm.reset_prefix_cache()
        assert_as(reference, llm.generate(prompts, params, use_tqdm=False, lora_request=one)[0])
