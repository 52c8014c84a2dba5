#!/usr/bin/env bash
# All that needs a card, in one go (under 10 minutes, one NVIDIA GPU of sm_80 or newer, no network):
# every kernel against plain torch, the engine's tokens on both, hand-offs between two caches on the
# card, and speed beside the roofline.
#
#   tests/gpu/run.sh [--device cpu] [--skip kernels|tokens|handoff|speed] [--quick]
#
# --device cpu interprets the kernels on tiny shapes: it checks this script, not the card.
# PYTHON names the interpreter (default python3). Exit 0: all right; 1: something differs; 2: a
# package or the card is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

export PYTHONPATH="$PWD:$PWD/scripts:$PWD/tests/gpu:$PWD/tests/unit/triton_kernels"
case " $* " in
  *" --device cpu "*) export TRITON_INTERPRET=1 ;;
  *) export TRITON_INTERPRET=0 ;;
esac
exec "${PYTHON:-python3}" tests/gpu/check.py "$@"
