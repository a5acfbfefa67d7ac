"""Measure a device's copy bandwidth and matrix peak in a process of its own, so that nothing of it stays in the device's memory.

python device_limits.py TORCH_DEVICE COPY_BYTES MATRIX_WIDTH REPEATS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device_clock import Clock, copy_bandwidth, matrix_peak


def main() -> None:
    """Print both as one line of JSON."""
    import torch

    name, size, width, repeats = sys.argv[1], *map(int, sys.argv[2:5])
    clock = Clock(torch.device(name))
    found = {
        "copy_bytes_per_s": copy_bandwidth(clock, size, repeats),
        "matrix_operations_per_s": matrix_peak(clock, width, repeats),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
