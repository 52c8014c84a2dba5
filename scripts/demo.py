"""`make demo`: install, fetch the model, start everything, ask one question, end cleanly."""

from __future__ import annotations

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
        if code := subprocess.run(command, cwd=ROOT).returncode:
            print(f"demo: {name} ended with exit code {code}", file=sys.stderr)
            return code
        took[name] = time.monotonic() - began
    print("demo: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
