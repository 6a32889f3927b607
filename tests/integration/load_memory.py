"""Load a checkpoint in this process and print, as JSON, what that did to its memory.

    python3 -m tests.integration.load_memory CHECKPOINT

With VLLM_TARGET_DEVICE=cpu, which makes vLLM leave all plugins out, the figures are upstream's.

Bytes of resident memory: ``before`` and ``after`` loading the weights, and the
``peak`` while loading; ``*_anonymous`` without pages of mapped files, which the
kernel can drop; ``generated`` after a few tokens; ``faults`` per token of the
steady state.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MIB = 1 << 20
TOKENS = 4


def status(*fields: str) -> int:
    """Sum of fields of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    values = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(values[field].split()[0]) * 1024 for field in fields)


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.utils import cpu_resource_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # Upstream asks lscpu, which does not run beside the emulator.
    cpu_resource_utils._get_cpu_list = cpu_resource_utils._synthesize_cpu_list

    result: dict[str, Any] = {}
    original = CPUModelRunner.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        done = threading.Event()
        result["before"], result["before_anonymous"] = status("VmRSS"), status("RssAnon")
        peaks = [0, 0]

        def sample() -> None:
            while not done.is_set():
                peaks[0] = max(peaks[0], status("VmRSS"))
                peaks[1] = max(peaks[1], status("RssAnon"))
                time.sleep(0.02)

        # Where the kernel allows it, its own record of the peak is exact.
        try:
            Path("/proc/self/clear_refs").write_text("5")
            exact = True
        except OSError:
            exact = False
        sampler = threading.Thread(target=sample)
        sampler.start()
        loaded = original(*args, **kwargs)
        done.set()
        sampler.join()
        result["peak"] = max(peaks[0], status("VmHWM") if exact else 0)
        result["peak_anonymous"] = peaks[1]
        # Allocators give memory back a little later.
        time.sleep(2)
        result["after"], result["after_anonymous"] = status("VmRSS"), status("RssAnon")
        return loaded

    CPUModelRunner.load_model = load_model
    settings = {"max_model_len": 128, "kv_cache_memory_bytes": 16 * MIB, "skip_tokenizer_init": True, "max_num_seqs": 2}
    # Upstream, which this can load as well, would call g++ otherwise.
    llm = LLM(sys.argv[1], enforce_eager=True, **settings)
    params = SamplingParams(max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    result["generated"] = status("VmRSS")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    result["faults"] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / TOKENS
    print(json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
