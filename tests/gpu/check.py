"""The checks of tests/gpu/run.sh, which says what they are and sets the path up."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec

PACKAGES = ("torch", "triton", "numpy", "msgspec", "safetensors", "transformers", "tokenizers")
PARTS = ("kernels", "tokens", "handoff", "speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--skip", choices=PARTS, nargs="+", default=[])
    parser.add_argument("--quick", action="store_true", help="fewer kernels' dtypes, shorter runs")
    args = parser.parse_args()
    if problem := lacking(args.device):
        print(f"gpu check: {problem}", file=sys.stderr)
        return 2
    import engine_check
    import handoff_check
    import kernel_check
    import speed_check

    runs = {
        "kernels": kernel_check.run,
        "tokens": engine_check.run,
        "handoff": handoff_check.run,
        "speed": speed_check.run,
    }
    began, wrong = time.monotonic(), 0
    for part in PARTS:
        if part not in args.skip:
            print(f"\n== {part}", flush=True)
            wrong += runs[part](args.device, args.quick)
    verdict = f"{wrong} WRONG" if wrong else "all right"
    print(f"\ngpu check: {verdict}, {time.monotonic() - began:.0f} s")
    return int(bool(wrong))


def lacking(device: str) -> str:
    """What is missing here, in one sentence, or nothing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        return f"these Python packages are needed and not installed: {', '.join(missing)}"
    if device == "cpu":
        return ""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch (--device cpu checks the script alone)"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return "the card is sm_{}{}; the kernels need sm_80 or newer".format(*capability)
    return ""


if __name__ == "__main__":
    sys.exit(main())
