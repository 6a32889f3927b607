"""Servers whose processes are forked from one that has imported vLLM: under emulation that is most of a start.

The rest is as ``vllm serve`` does it, from the command line on. What a process
is born with (preloaded libraries, OpenMP's settings) is not: that is shown by
servers that start as users start them.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import BinaryIO

from tests.e2e.server import Process, Server

# What a server and its engine import; what else they want they import themselves.
IMPORTS = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "vllm_arm_cpu.worker.worker",
]


class ForkedServer(Server):
    """A server as :class:`Server` is; with as little of its own to import as can be."""

    def _launch(self, log: BinaryIO) -> Process:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        environ = {**self._environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        process = context.Process(target=_serve, args=(self._command, environ, str(self.log_path)))
        process.start()
        return _Forked(process)


class _Forked:
    """A child of the process that forks, with the methods of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sig: int, /) -> None:
        os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("vllm serve", timeout)
        return self._process.exitcode


def _serve(command: Sequence[str], environ: Mapping[str, str], log: str) -> None:
    """Become a server; runs in the child."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(command)
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine import utils

    # On CPUs vLLM spawns its engine, whatever VLLM_WORKER_MULTIPROC_METHOD says.
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    main()
