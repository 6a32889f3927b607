"""Serve a model with ``vllm serve``, ask it over HTTP, and say what took how long.

demo.py MODEL_DIR PROMPT
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT = 1200.0
"""Seconds until the server must answer; under emulation imports alone take minutes."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def last_line(log: Path) -> str:
    """The newest line that the server logged, cut to a terminal's width."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[-110:] if lines else "starting"


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server is healthy; exit with its log if it ends or takes too long."""
    begin = time.monotonic()
    shown = 0.0
    while True:
        if server.poll() is not None:
            sys.stderr.write(log.read_text(errors="replace")[-6000:])
            sys.exit(f"demo: the server ended with status {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                break
        except (urllib.error.URLError, OSError):
            pass
        elapsed = time.monotonic() - begin
        if elapsed > START_TIMEOUT:
            sys.exit(f"demo: the server was not ready after {START_TIMEOUT:.0f} s; last: {last_line(log)}")
        if sys.stdout.isatty():
            print(f"\r\033[K  {elapsed:5.0f} s  {last_line(log)}", end="", flush=True)
        elif elapsed - shown >= 20:
            shown = elapsed
            print(f"  {elapsed:5.0f} s  {last_line(log)}", flush=True)
        time.sleep(0.5)
    if sys.stdout.isatty():
        print("\r\033[K", end="")


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Texts of a streamed chat answer, as they arrive."""
    with post(url, {**body, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


def main(model: str, prompt: str) -> None:
    phases: list[tuple[str, float]] = []
    begin = time.monotonic()

    def phase(name: str) -> None:
        nonlocal begin
        phases.append((name, time.monotonic() - begin))
        begin = time.monotonic()

    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        name = Path(model).name
        command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
        # Small enough for any machine the demo may run on; a real server needs neither.
        command += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20)]
        print(f"$ {' '.join(command)}", flush=True)
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until_ready(server, url, log)
            phase("start until ready")

            body = {"model": name, "prompt": prompt, "max_tokens": 48, "temperature": 0}
            with post(f"{url}/v1/completions", body) as response:
                answer = json.load(response)
            phase("completion")
            print(f"\ncompletion: {prompt}\033[1m{answer['choices'][0]['text']}\033[0m")
            print(f"            {answer['usage']['completion_tokens']} tokens")

            print("\nchat, streamed: ", end="", flush=True)
            message = {"role": "user", "content": prompt}
            chat = {"model": name, "messages": [message], "max_tokens": 48, "temperature": 0.7, "seed": 1}
            has_template = "chat_template" in (Path(model) / "tokenizer_config.json").read_text()
            if has_template or (Path(model) / "chat_template.jinja").exists():
                for text in stream(f"{url}/v1/chat/completions", chat):
                    print(text, end="", flush=True)
                print()
            else:
                print("(this checkpoint has no chat template)")
            phase("streamed chat answer")
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                sys.exit("demo: the server did not end within 60 s of SIGTERM")
        phase("shutdown")
        print("\nserver ended with status", server.returncode)
    print(flush=True)
    subprocess.run(["vllm-arm-cpu", "doctor"], check=False)
    phase("doctor")
    print()
    for name, seconds in phases:
        print(f"{name:24s}{seconds:8.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:3])
