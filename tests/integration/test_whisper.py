"""Whisper, an encoder and a decoder: cross attention to what was heard, against Hugging Face transformers in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizerFast,
)
from vllm import SamplingParams
from vllm.v1.attention.backend import AttentionType

from tests.integration.engine import engine, worker
from vllm_arm_cpu.attention.backend import ArmAttentionImpl

SECONDS = 2
SAMPLING_RATE = 16000
NEW_TOKENS = 10
MARGIN = 0.1
"""How much the likeliest token must lead in FP32, in natural logarithms, for a BF16 engine to have to agree."""
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]


def processor() -> WhisperProcessor:
    """Whisper's own, for audio of two seconds and a vocabulary of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "pad_token": SPECIAL[0], "unk_token": SPECIAL[0]}
    fast = WhisperTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, **special)
    # Frames are 10 ms, and the encoder halves them.
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS), fast)


def save_checkpoint(directory: Path) -> WhisperForConditionalGeneration:
    """Write a tiny checkpoint with random weights; the reference in FP32, whose weights are BF16 numbers."""
    parts = processor()
    tokens = dict(zip(SPECIAL, parts.tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    end, start = tokens["<|endoftext|>"], tokens["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=len(parts.tokenizer), num_mel_bins=80, d_model=128, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256,
        max_source_positions=50 * SECONDS, max_target_positions=64, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=start, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "layer_norm" in name and name.endswith("weight"):
                value = 1 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.2 * noise
            elif "embed" in name:
                value = 0.3 * noise
            else:
                value = 1.5 * noise * parameter[0].numel() ** -0.5
            parameter.copy_(value.to(torch.bfloat16))
        # Looks at the encoder's states sharply, so that it matters what was heard.
        for layer in model.model.decoder.layers:
            layer.encoder_attn.q_proj.weight.mul_(2)
            layer.encoder_attn.out_proj.weight.mul_(2)
    model.save_pretrained(directory)
    parts.save_pretrained(directory)
    return model


def sounds() -> list[np.ndarray]:
    """Audio of different length and pitch."""
    rng = np.random.default_rng(0)
    result = []
    for seconds, pitch in ((2.0, 440), (0.7, 1200), (1.5, 90)):
        t = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
        result.append((0.4 * np.sin(2 * np.pi * pitch * t * (1 + t)) + 0.1 * rng.standard_normal(len(t))).astype("f4"))
    return result


def prompt_ids(parts: WhisperProcessor) -> list[int]:
    names = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    ids: list[int] = parts.tokenizer.convert_tokens_to_ids(names)
    return ids


def test_against_transformers(tmp_path: Path) -> None:
    """Three recordings in one batch: tokens and their probabilities are those of FP32."""
    reference = save_checkpoint(tmp_path)
    parts = processor()
    prompt = prompt_ids(parts)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    requests: list[Any] = [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (audio, SAMPLING_RATE)}},
            "decoder_prompt": {"prompt_token_ids": prompt},
        }
        for audio in sounds()
    ]
    with engine(tmp_path, dtype="bfloat16", max_model_len=64) as llm:
        context = worker(llm).model_runner.compilation_config.static_forward_context
        assert {layer.attn_type for layer in context.values()} == {AttentionType.DECODER, AttentionType.ENCODER_DECODER}
        assert all(isinstance(layer.impl, ArmAttentionImpl) for layer in context.values())
        outputs = llm.generate(requests, params, use_tqdm=False)
    features = [parts(audio, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features for audio in sounds()]
    sure, chosen = 0, []
    for output, heard in zip(outputs, features, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        chosen.append(tuple(tokens))
        with torch.no_grad():
            logits = reference(heard, decoder_input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0]
        expected = logits[len(prompt) - 1 :].log_softmax(dim=-1)
        for step, token in enumerate(tokens):
            best, second = expected[step].topk(2).values.tolist()
            if best - second > MARGIN:
                sure += 1
                assert token == int(expected[step].argmax()), f"step {step}"
            assert abs(output.outputs[0].logprobs[step][token].logprob - float(expected[step][token])) < 0.15
    assert sure > NEW_TOKENS * len(outputs) / 2
    assert len(set(chosen)) > 1, "the continuation does not depend on what was heard: the test shows nothing"
