"""Qwen2.5-VL, an image in a chat: a vision tower with windows, positions of three dimensions; against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from vllm import SamplingParams
from vllm.model_executor.layers.linear import LinearBase

from tests.integration.checkpoints import SIZES, randomize
from tests.integration.engine import MODEL, engine, worker
from tests.integration.test_images import check_answers, message, picture
from vllm_arm_cpu.attention.backend import ArmAttentionImpl
from vllm_arm_cpu.layers.linear import PackedLinear

# Behind the embedded checkpoint's vocabulary, whose tokenizer is used.
TOKENS = {f"<|{name}|>": 2048 + i for i, name in enumerate(("image_pad", "video_pad", "vision_start", "vision_end"))}
IMAGE, VIDEO, START, END = TOKENS.values()
NEW_TOKENS = 8


def processor() -> Qwen2_5_VLProcessor:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"),
        **{key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "chat_template")},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == list(TOKENS.values())
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=settings["chat_template"]
    )


def save_checkpoint(directory: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Write a tiny checkpoint; the reference in FP32, whose weights are BF16 numbers."""
    text = {**SIZES, "vocab_size": 2112, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12],
    }}  # fmt: skip
    # Of the three blocks of the tower one looks at all of the image, the others at windows of two by two tokens.
    vision = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256,
        "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = randomize(Qwen2_5_VLForConditionalGeneration(config).eval())
    model.save_pretrained(directory)
    processor().save_pretrained(directory)
    return model


@torch.no_grad()
def logprobs(model: Qwen2_5_VLForConditionalGeneration, ids: list[int], image: Image.Image) -> torch.Tensor:
    tokens = torch.tensor([ids])
    seen = processor().image_processor(image, return_tensors="pt")
    with torch.backends.mkldnn.flags(enabled=False):
        logits = model(
            tokens,
            pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"],
            mm_token_type_ids=(tokens == IMAGE).int(),
        ).logits
    return logits[0].float().log_softmax(-1)


@pytest.mark.slow
def test_chat(tmp_path: Path) -> None:
    """Two images in two chats: each answer is as likely as FP32 says it is with that image."""
    reference = save_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    images = [picture(0), picture(1)]
    with engine(tmp_path, dtype="bfloat16", limit_mm_per_prompt={"image": 1, "video": 0}) as llm:
        runner = worker(llm).model_runner
        assert runner.uses_mrope
        linears = {name: m for name, m in runner.get_model().named_modules() if isinstance(m, LinearBase)}
        assert any("visual" in name for name in linears)
        assert {type(module.cpu_linear) for module in linears.values()} == {PackedLinear}
        context = runner.compilation_config.static_forward_context
        assert all(isinstance(layer.impl, ArmAttentionImpl) for layer in context.values())
        outputs = llm.chat([message(image) for image in images], params, use_tqdm=False)
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        assert prompt.count(IMAGE) == 6 and prompt.count(START) == prompt.count(END) == 1
    # BF16 through a tower of three blocks and a model of two layers, as for LLaVA.
    check_answers("Qwen2.5-VL", outputs, images, lambda ids, image: logprobs(reference, ids, image))
