"""LLaVA, an image in a chat: a vision tower in front of a Llama, against Hugging Face transformers in FP32."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.integration.checkpoints import SIZES, randomize
from tests.integration.engine import MODEL, engine, worker
from vllm_arm_cpu.layers import decoder

IMAGE_TOKEN = 2048
"""Behind the embedded checkpoint's vocabulary, whose tokenizer is used."""
PIXELS, PATCH = 32, 8
NEW_TOKENS = 8


def processor() -> LlavaProcessor:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"), **{key: settings[key] for key in ("bos_token", "eos_token")}
    )
    tokenizer.pad_token = settings["pad_token"]
    tokenizer.chat_template = settings["chat_template"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    images = CLIPImageProcessor(size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=settings["chat_template"],
    )


def save_checkpoint(directory: Path) -> LlavaForConditionalGeneration:
    """Write a tiny checkpoint; the reference in FP32, whose weights are BF16 numbers."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, projection_dim=64,
            image_size=PIXELS, patch_size=PATCH,
        ),
        text_config=LlamaConfig(**{**SIZES, "vocab_size": 2112}),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(PIXELS // PATCH) ** 2,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = randomize(LlavaForConditionalGeneration(config).eval())
    model.save_pretrained(directory)
    # As the published checkpoints name them; transformers 5 leaves a level out.
    file = directory / "model.safetensors"
    renamed = {re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(renamed, file, {"format": "pt"})
    processor().save_pretrained(directory)
    return model


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8))


def message(image: Image.Image) -> list[Any]:
    """A user's message with an image as a client sends it, and a question."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    return [{"role": "user", "content": content}]


@torch.no_grad()
def logprobs(model: LlavaForConditionalGeneration, ids: list[int], image: Image.Image) -> torch.Tensor:
    pixels = processor().image_processor(image, return_tensors="pt")["pixel_values"]
    with torch.backends.mkldnn.flags(enabled=False):
        return model(torch.tensor([ids]), pixel_values=pixels).logits[0].float().log_softmax(-1)


def test_chat(tmp_path: Path) -> None:
    """Two images in two chats: each answer is as likely as FP32 says it is with that image."""
    reference = save_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    images = [picture(0), picture(1)]
    with engine(tmp_path, dtype="bfloat16", limit_mm_per_prompt={"image": 1}) as llm:
        (segment,) = decoder.segments(worker(llm).model_runner.get_model())
        assert len(segment.layers) == SIZES["num_hidden_layers"]
        outputs = llm.chat([message(image) for image in images], params, use_tqdm=False)
    for output in outputs:
        assert list(output.prompt_token_ids).count(IMAGE_TOKEN) == (PIXELS // PATCH) ** 2
    # BF16 through a tower of two layers, a projection and two layers: some hundredths each, as for the models of text.
    check_answers("LLaVA", outputs, images, lambda ids, image: logprobs(reference, ids, image))


def check_answers(
    name: str, outputs: list[Any], images: list[Image.Image], exact: Callable[[list[int], Image.Image], torch.Tensor]
) -> None:
    """The answer about each of two images is as likely as FP32 says it is with that one, and not with the other.

    exact: tokens and an image -> FP32 logprobs [tokens, vocabulary] of what follows each.
    """
    differences, between = [], []
    for image, other, output in zip(images, images[::-1], outputs, strict=True):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        ids = (prompt + tokens)[:-1]
        expected, mistaken = (exact(ids, shown)[len(prompt) - 1 :] for shown in (image, other))
        for step, token in enumerate(tokens):
            got = output.outputs[0].logprobs[step][token].logprob
            differences.append(abs(got - float(expected[step][token])))
            between.append(abs(float(mistaken[step][token] - expected[step][token])))
    print(
        f"{name}: logprobs are off FP32's by {max(differences):.3f} at most, {np.median(differences):.3f} in the "
        f"median; the other image changes {max(between):.3f}"
    )
    assert max(differences) < 0.2
    # The image matters, more than rounding does.
    assert max(between) > 2 * max(differences)
    assert float(np.median(differences)) < 0.05


@pytest.mark.slow
def test_too_many_images(tmp_path: Path) -> None:
    """One more than allowed is refused, and the engine goes on."""
    save_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2)
    with engine(tmp_path, dtype="bfloat16", limit_mm_per_prompt={"image": 1}) as llm:
        (one,) = message(picture(0))
        two = [{"role": "user", "content": one["content"][:1] + one["content"]}]
        with pytest.raises(VLLMValidationError, match="At most 1 image"):
            llm.chat([two], params, use_tqdm=False)
        (output,) = llm.chat([[one]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
