"""For all tests: one torch thread, because OpenMP's fork-join collapses when tests share two cores with anything else."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
