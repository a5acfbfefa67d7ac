"""Makes the shared helpers of core/tests importable."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402

# Tiny models gain nothing from a second thread, and lose much to it on a busy machine.
torch.set_num_threads(1)
