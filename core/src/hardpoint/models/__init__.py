"""Models: finding one, reading its configuration, weights and tokenizer, and running its decoder.

A family of the core is one file (`decoder` says how it is written, `llama` is the one to read first) over `hardpoint.layers`. A model
runs by the first of three ways that can: as one program of the backend's kernel set, by the core's layers, by transformers'
modelling code with the backend's attention in it. Nothing here schedules or samples, and importing this package imports
neither torch nor transformers.
"""

from hardpoint.layers.parallel import ParallelRank, Ranks
from hardpoint.models.base import CapturableModel, RunnableModel
from hardpoint.models.loader import attention_layers, load_model
from hardpoint.models.registry import ARCHITECTURES
from hardpoint.models.source import DEMO, LOAD_FORMATS, ModelFormat, ModelSource, open_model
from hardpoint.models.tokenizer import TokenizerBackend, load_tokenizer, panics_as_errors, write_chat

__all__ = [
    "ARCHITECTURES",
    "DEMO",
    "LOAD_FORMATS",
    "CapturableModel",
    "ModelFormat",
    "ModelSource",
    "ParallelRank",
    "Ranks",
    "RunnableModel",
    "TokenizerBackend",
    "attention_layers",
    "load_model",
    "load_tokenizer",
    "open_model",
    "panics_as_errors",
    "write_chat",
]
