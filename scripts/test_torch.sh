#!/usr/bin/env bash
# Runs the tests of one real build of torch (cuda, ascend) over its simulated driver, in the environment that torch_environment.sh made.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
export HARDPOINT_REAL_TORCH=$build HARDPOINT_TORCH_LIBRARIES=$PWD/.torch/$build/libraries
# The conftest files above are left out: they import torch, whose libraries must be loaded first.
pytest=(".torch/$build/bin/python" -m pytest -q -p no:cacheprovider --confcutdir=tests/real_torch)

"${pytest[@]}" tests/real_torch
# Once more where the host cannot touch the device's memory, and copies run only when they are waited for.
HARDPOINT_SIM_STRICT_HOST=1 HARDPOINT_SIM_DEFERRED=1 "${pytest[@]}" tests/real_torch/test_torch_pools.py
