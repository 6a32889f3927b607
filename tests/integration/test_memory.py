"""A weight is in memory once: while a checkpoint is loaded, and afterwards.

VAC_TEST_LARGE=1 does it with a checkpoint of 1 GB instead of 150 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.model_loader import default_loader

from tests.integration.load_memory import status
from vllm_arm_cpu.compat import checkpoint_pages

# Each case is a process of its own, which imports vLLM.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LARGE = bool(os.environ.get("VAC_TEST_LARGE"))
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = (2048, 8192, 8, 16384) if LARGE else (1024, 4096, 4, 8192)
HEADS, KV_HEADS, HEAD_SIZE = HIDDEN // 64, HIDDEN // 256, 64

# Translated code of the emulator, Python objects of the model, activations of no size.
SLACK = (64 if LARGE else 32) * MIB


def make_checkpoint(directory: Path, tied: bool) -> tuple[int, int]:
    """Random BF16 weights; returns the bytes of all, and of the layer that is largest when packed."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))

    def matrix(n: int, k: int) -> torch.Tensor:
        # Random bits of exponents around one: fast to make under emulation.
        bits = torch.randint(0x3C00, 0x3D00, (n, k), generator=generator, dtype=torch.int16)
        return bits.view(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": matrix(1, HIDDEN)[0]}
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(1, HIDDEN)[0]
    save_file(tensors, directory / "model.safetensors")
    # gate and up are one layer.
    largest = 2 * max(VOCAB * HIDDEN, 2 * INTERMEDIATE * HIDDEN)
    return sum(tensor.numel() * 2 for tensor in tensors.values()), largest


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_in_memory_once(tmp_path: Path, tied: bool) -> None:
    model, layer = make_checkpoint(tmp_path / "model", tied)
    assert model > (1000 if LARGE else 130) * 1e6
    environ = os.environ | {"VAC_LINEAR": "vac"}
    command = [sys.executable, "-m", "tests.integration.load_memory", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    before = got["before"]
    print(
        f"{'tied' if tied else 'untied'}: checkpoint {model / MIB:.0f} MiB, largest layer {layer / MIB:.0f}; "
        + ", ".join(f"{name} +{(got[name] - before) / MIB:.0f}" for name in ("peak", "after", "generated"))
        + f", peak of anonymous memory +{(got['peak_anonymous'] - got['before_anonymous']) / MIB:.0f}, "
        + f"{got['faults']:.1f} minor faults a token"
    )
    assert got["after"] - before > 0.95 * model
    assert got["after"] - before < model + SLACK
    assert got["generated"] - before < model + 2 * SLACK
    assert got["peak_anonymous"] - got["before_anonymous"] < model + layer + SLACK
    assert got["peak"] - before < model + layer + SLACK


def test_what_was_read_of_a_checkpoint_is_released(tmp_path: Path) -> None:
    """Resident pages of the file do not add up, and a tensor that is kept or written to keeps its values."""
    path = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.full((1 << 20,), float(i)) for i in range(12)} | {"odd": torch.arange(7)}, path)
    expected = load_file(path)
    size = path.stat().st_size

    def read() -> int:
        """Read every tensor; returns by how many bytes the pages of files grew."""
        start, most, kept = status("RssFile", "RssShmem"), 0, {}
        for name, tensor in default_loader.safetensors_weights_iterator([str(path)], False):
            assert torch.equal(tensor, expected[name])
            most = max(most, status("RssFile", "RssShmem"))
            if name == "w3":
                tensor += 1
            if name in ("w2", "w3", "odd"):
                kept[name] = tensor
        assert torch.equal(kept["w2"], expected["w2"])
        assert torch.equal(kept["w3"], expected["w3"] + 1)
        assert torch.equal(kept["odd"], expected["odd"])
        return most - start

    read()  # translated code and imports
    assert read() > 0.8 * size, "vLLM releases what it has read: compat/checkpoint_pages.py can go"
    with checkpoint_pages.released_once_read():
        assert read() < 0.4 * size
        # This loading strategy yields memory that is not the file's: to release it would be to destroy it.
        for name, tensor in list(default_loader.safetensors_weights_iterator([str(path)], False, "eager")):
            assert torch.equal(tensor, expected[name])
    assert default_loader.safetensors_weights_iterator.__name__ == "safetensors_weights_iterator"
