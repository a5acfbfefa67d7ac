"""The names of vLLM that TRL's colocated mode uses, over this engine.

`python -m hardpoint.compat.vllm train.py` runs a script in which `import vllm` means this package; `stand_in()` does the same from within
a program, before anything imports `vllm`.
"""

from __future__ import annotations

import sys

from hardpoint import CompletionOutput, PoolingParams, RequestOutput, SamplingParams
from hardpoint.compat.vllm import sampling_params, server_mode
from hardpoint.compat.vllm.llm import LLM
from hardpoint.interfaces.errors import ConfigError

__all__ = ["LLM", "CompletionOutput", "PoolingParams", "RequestOutput", "SamplingParams", "stand_in"]

__version__ = "0.31.0"
"""Of vLLM, whose names and arguments these are."""

_STANDS_FOR = {
    "vllm": sys.modules[__name__],
    "vllm.sampling_params": sampling_params,
    "vllm.utils.network_utils": server_mode,
    "vllm.distributed.weight_transfer.nccl_common": server_mode,
    "vllm.distributed.weight_transfer.packed_tensor": server_mode,
}


def stand_in() -> None:
    """Let `import vllm` mean this package, in this process; raises ConfigError where vLLM itself was imported already."""
    there = sys.modules.get("vllm")
    if there is not None and there is not _STANDS_FOR["vllm"]:
        raise ConfigError(
            "vLLM was imported already, and cannot be replaced any more",
            found=str(getattr(there, "__file__", there)),
            hint="Call stand_in() before the first import of vllm or trl, or run `python -m hardpoint.compat.vllm SCRIPT`",
        )
    sys.modules.update(_STANDS_FOR)
