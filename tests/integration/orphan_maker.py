"""A driver that is going to be killed: starts two ranks, prints their ids, and waits.

``python orphan_maker.py MODEL_DIR COMMAND`` gives its ranks' ports a command to be at meanwhile.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tiny_llama import tiny_config

from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig


def main() -> None:
    path = Path(sys.argv[1])
    executor = ProcessExecutor(
        tiny_config(path, tp=2), ModelConfig.from_dir(path), port="echo_port:echo"
    )
    started = threading.Semaphore(0)
    executor.on_port_message(lambda rank, message: started.release())
    executor.send_port(sys.argv[2].encode())
    for _ in range(2):
        started.acquire(timeout=30.0)
    print(*executor.processes, flush=True)
    threading.Event().wait(60.0)


if __name__ == "__main__":
    main()
