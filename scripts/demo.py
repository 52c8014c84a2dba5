"""`make demo`: install, fetch the model, start everything, ask one question, end cleanly."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EKIDEN = ROOT / ".venv" / "bin" / "ekiden"
MODEL = "smollm2-135m-instruct"
# Long enough that decode asks the prefill pool: short prompts it computes itself.
QUESTION = (
    "A relay race is run by a team. Each runner covers one part of the distance and then hands a "
    "baton to the next runner inside a marked zone. In Japan there is a long-distance relay race "
    "on roads that is called ekiden. In an ekiden the runners do not hand over a baton. They hand "
    "over a sash, which is called tasuki, and every runner wears it over one shoulder. "
    "What do the runners hand over in an ekiden, and what is it called?"
)
STEPS = {
    "install": [sys.executable, str(ROOT / "scripts" / "install.py"), "--extra", "local"],
    "model": [str(EKIDEN), "models", "pull", MODEL],
    "run": [str(EKIDEN), "up", MODEL, "--port", "0", "--ask", QUESTION],
}


def main() -> int:
    took: dict[str, float] = {}
    for name, command in STEPS.items():
        began = time.monotonic()
        if code := run(command):
            print(f"demo: {name} ended with exit code {code}", file=sys.stderr)
            return code
        took[name] = time.monotonic() - began
    print("demo: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items()))
    return 0


def run(command: list[str]) -> int:
    """The step's exit code. Ctrl-C reaches it by the terminal, SIGTERM by us; it ends in its own
    time, and we wait for it."""
    with subprocess.Popen(command, cwd=ROOT) as step:
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: step.terminate())
        return step.wait()


if __name__ == "__main__":
    sys.exit(main())
