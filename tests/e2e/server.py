"""A ``vllm serve`` of its own session: started, asked, ended, and what it leaves behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
MODEL_NAME = "tiny-llama"

# Of what else runs on the machine nothing is known, so it is remembered from before the first server.
_SHARED_MEMORY_BEFORE = frozenset(os.listdir("/dev/shm"))


class Process(Protocol):
    """What a server needs of its first process; of ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class HttpError(Exception):
    """The server answered with an error; ``status`` and the message of the body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Server:
    """One server.

    Args:
        directory: for its log and its temporary files (TMPDIR).
        environ: on top of this process's environment.
        arguments: further arguments of ``vllm serve``.
        model: the checkpoint that it serves.
    """

    def __init__(
        self, directory: Path, environ: dict[str, str] | None = None, *arguments: str, model: Path = MODEL
    ) -> None:
        self.log_path = directory / "server.log"
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = ["vllm", "serve", str(model), "--served-model-name", MODEL_NAME]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "512"]
        self._command += ["--kv-cache-memory-bytes", str(64 << 20), *arguments]
        # A folder of its own shows what is left behind.
        self._environ = {**os.environ, "TMPDIR": str(self.temporary), **(environ or {})}
        self._process: Process | None = None
        self.started = 0.0

    # --- life -----------------------------------------------------------------

    def start(self) -> None:
        """Start it and return at once."""
        with self.log_path.open("wb") as log:
            self._process = self._launch(log)
        self.started = time.monotonic()

    def _launch(self, log: BinaryIO) -> Process:
        return subprocess.Popen(
            self._command,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The first process, which is also the id of the session."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until_ready(self, timeout: float) -> float:
        """Wait until it is healthy; returns the seconds since its start.

        Raises:
            AssertionError: it ended, or ``timeout`` seconds are over; with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.running, f"ended with status {self.wait(1)} before it was ready\n{self.log_tail()}"
            try:
                self.get("/health")
            except (OSError, HttpError):
                time.sleep(1)
                continue
            return time.monotonic() - self.started
        raise AssertionError(f"not ready after {timeout:.0f} s\n{self.log_tail()}")

    def wait_for_engine_core(self, timeout: float) -> int:
        """Wait until the EngineCore process exists; returns its process id."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.running, f"ended with status {self.wait(1)}\n{self.log_tail()}"
            pid = self.engine_core()
            if pid is not None:
                return pid
            time.sleep(0.2)
        raise AssertionError(f"no EngineCore after {timeout:.0f} s\n{self.log_tail()}")

    def terminate(self) -> None:
        """Ask its first process to end, as an init system or a container's runtime does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Exit status of the first process, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        assert self._process is not None
        return self._process.wait(timeout)

    def wait_until_gone(self, timeout: float) -> list[int]:
        """Wait until no process of the session is left; returns those that are, after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes()

    def kill(self) -> None:
        """End whatever is left of it."""
        if self._process is None:
            return
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(30)

    # --- what it is made of ----------------------------------------------------

    def processes(self) -> list[int]:
        """Processes of the session, the first one first; those that only wait for their parent do not count."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                state, session = _state_and_session(int(entry))
                if session == self.pid and state not in "ZX":
                    found.append(int(entry))
        return sorted(found)

    def engine_core(self) -> int | None:
        """Process id of the EngineCore, None before it has named itself."""
        # The kernel cuts the title to 15 characters; the command line is the emulator's under emulation.
        names = {pid: process_name(pid) for pid in self.processes()}
        return next((pid for pid, name in names.items() if name == "VLLM::EngineCor"), None)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, characters: int = 5000) -> str:
        return self.log()[-characters:]

    def leftovers(self) -> list[str]:
        """Processes, shared memory and temporary files that are there although the server has ended.

        Names of sockets and empty folders hold nothing; vLLM and torch never remove theirs.
        """
        left = [f"process {pid} ({process_name(pid)})" for pid in self.processes()]
        in_use = _shared_memory_in_use()
        for path in sorted(Path("/dev/shm").iterdir()):
            if path.name not in _SHARED_MEMORY_BEFORE and path.stat().st_ino not in in_use:
                left.append(str(path))
        # vLLM's rendezvous file, a few bytes, goes with the process group: not when the engine dies before it has one.
        files = (path for path in self.temporary.rglob("*") if path.is_file())
        left += sorted(str(path) for path in files if not path.name.startswith("vllm_dist_"))
        return left

    # --- requests ----------------------------------------------------------------

    def get(self, path: str, timeout: float = 120) -> str:
        """Body of a GET.

        Raises:
            HttpError: the answer is an error.
            OSError: there is no answer.
        """
        return self._open(urllib.request.Request(self.url + path), timeout).read().decode()

    def post(self, path: str, timeout: float = 240, **body: Any) -> dict[str, Any]:
        """Answer to a JSON request; errors as in :meth:`get`."""
        with self._open(self._request(path, body), timeout) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, path: str, timeout: float = 240, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer as they arrive; errors as in :meth:`get`."""
        with self._open(self._request(path, {**body, "stream": True}), timeout) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def complete(self, prompt: list[int] | str, max_tokens: int, **body: Any) -> dict[str, Any]:
        """The first choice of a greedy completion, with token ids."""
        answer = self.post(
            "/v1/completions",
            **{
                "model": MODEL_NAME,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "return_token_ids": True,
                **body,
            },
        )
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps(body).encode()
        return urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})

    def _open(self, request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise HttpError(error.code, _error_message(error.read())) from None
        return response


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def process_name(pid: int) -> str:
    """The name a process gave itself, at most 15 characters; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def process_environ(pid: int) -> dict[str, str]:
    """The environment a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries if entry)


def _state_and_session(pid: int) -> tuple[str, int]:
    try:
        # Behind the name, which may hold anything: state, parent, group, session.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[3])
    except (OSError, IndexError):
        return "X", 0


def _shared_memory_in_use() -> set[int]:
    """Inodes of /dev/shm that some process has open or mapped; by name, semaphores are called otherwise in maps."""
    inodes = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        process = Path("/proc") / entry
        try:
            maps = (process / "maps").read_text().splitlines()
            links = list((process / "fd").iterdir())
        except OSError:
            continue
        inodes.update(int(line.split()[4]) for line in maps if " /dev/shm/" in line)
        for link in links:
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("/dev/shm/"):
                    inodes.add(link.stat().st_ino)
    return inodes


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
