"""Workers whose ranks meet with misfortune: named by ``--worker-cls``, so they run in the server's own processes."""

from __future__ import annotations

import os
import signal
import sys
import time

from vllm_arm_cpu.worker.worker import ArmCpuWorker

DAMAGED_MODEL = "TEST_DAMAGED_MODEL"
"""Variable with the folder that the second rank reads."""

DIES = "the engine dies at"


class DamagedDisk(ArmCpuWorker):
    """The second rank finds another checkpoint than the first."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As the package's, from the other folder."""
        if self.rank == 1:
            self.model_config.model = os.environ[DAMAGED_MODEL]
        super().load_model(load_dummy_weights=load_dummy_weights)


class ShortLife(ArmCpuWorker):
    """An engine of one rank that is killed by the first thing that the API server asks of it, before it serves."""

    def reset_mm_cache(self) -> None:
        """Die, and say when."""
        print(DIES, time.monotonic(), file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
