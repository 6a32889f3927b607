"""Speech over HTTP: Whisper base with its real weights hears what a synthesiser says, through OpenAI's client."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from torchaudio.functional import resample
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.server import MODEL_NAME, ROOT, Server

WHISPER = ROOT / "build" / "whisper-base"
SPEECH = ROOT / "build" / "speech"
AUDIO_PACKAGES = ROOT / "build" / "audio-packages"
"""What ``pip install vllm[audio]`` would add of what the endpoint imports."""

HEARD = {"train": ["train", "leaves", "every", "morning"], "dogs": ["brother", "two dogs", "cat", "sleep", "kitchen"]}
"""Recording -> words of the text that it was made of which must be in any transcription that is of use."""

MODEL_LENGTH = 448

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(folder.is_dir() for folder in (WHISPER, SPEECH, AUDIO_PACKAGES)),
        reason="scripts/slow_data.sh makes them of packages on PyPI and with espeak-ng",
    ),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    paths = [str(AUDIO_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"PYTHONPATH": os.pathsep.join(paths), "VAC_LINEAR": "vac"}
    # Products in BF16 take longest under emulation; test_whisper.py has them.
    arguments = ["--dtype", "float32", "--max-model-len", str(MODEL_LENGTH), "--skip-mm-profiling"]
    server = Server(tmp_path_factory.mktemp("whisper"), environ, *arguments, model=WHISPER)
    try:
        server.start()
        server.wait_until_ready(START_TIMEOUT)
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
        # A killed server leaves its semaphores, which tests of how servers end would find.
        server.terminate()
        server.wait(END_TIMEOUT)
        assert server.wait_until_gone(END_TIMEOUT) == []
    finally:
        server.kill()


@torch.no_grad()
def likeliest(file: Path, text: str) -> str:
    """What transformers in FP32 finds likeliest behind each token of a text; the text, if that is its transcription."""
    parts = WhisperProcessor.from_pretrained(WHISPER)
    model = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32).eval()
    with wave.open(str(file)) as recording:
        rate = recording.getframerate()
        samples = np.frombuffer(recording.readframes(recording.getnframes()), np.int16)
    audio = resample(torch.from_numpy(samples.astype("f4") / (1 << 15)), rate, 16000)
    heard = parts(audio.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    prompt = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    ids = parts.tokenizer.convert_tokens_to_ids(prompt) + parts.tokenizer.encode(text, add_special_tokens=False)
    # oneDNN compiles a kernel for every shape, which takes longer under emulation than the products.
    with torch.backends.mkldnn.flags(enabled=False):
        logits = model(heard, decoder_input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 :]
    *tokens, end = logits.argmax(-1).tolist()
    assert end == model.config.eos_token_id
    return str(parts.tokenizer.decode(tokens))


def transcribe(client: openai.OpenAI, name: str) -> str:
    with (SPEECH / f"{name}.wav").open("rb") as file:
        answer = client.audio.transcriptions.create(model=MODEL_NAME, file=file, language="en", temperature=0)
    return answer.text


def test_transcriptions(client: openai.OpenAI) -> None:
    """Two recordings at once: each text is transformers', and what was said."""
    with ThreadPoolExecutor() as pool:
        texts = dict(zip(HEARD, pool.map(lambda name: transcribe(client, name), HEARD), strict=True))
    print(f"heard: {texts}")
    for name, words in HEARD.items():
        # Whisper's texts begin with a space.
        text = f" {texts[name].strip()}"
        assert likeliest(SPEECH / f"{name}.wav", text) == text
        assert [word for word in words if word not in texts[name]] == []


def test_stream(client: openai.OpenAI) -> None:
    """Piece by piece it is the same text."""
    with (SPEECH / "train.wav").open("rb") as file:
        stream = client.audio.transcriptions.create(
            model=MODEL_NAME, file=file, language="en", temperature=0, stream=True
        )
        # vLLM's chunks are those of chat completions.
        pieces = [choice["delta"].get("content") or "" for chunk in stream for choice in chunk.model_extra["choices"]]
    assert len(pieces) > 5
    assert [word for word in HEARD["train"] if word not in "".join(pieces)] == []


def test_no_audio(client: openai.OpenAI) -> None:
    """What is no recording is refused, and the server goes on."""
    with pytest.raises(openai.BadRequestError):
        client.audio.transcriptions.create(model=MODEL_NAME, file=("x.wav", b"RIFF, not more"), language="en")
    assert client.models.list().data[0].id == MODEL_NAME
