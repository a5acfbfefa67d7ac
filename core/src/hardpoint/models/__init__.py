"""Models: finding one, reading its configuration, weights and tokenizer, and running its decoder.

A family of the core is one file (`decoder` says how it is written, `llama` is the one to read first) over `hardpoint.layers`. A model
runs by the first of three ways that can: as one program of the backend's kernel set, by the core's layers, by transformers'
modelling code with the backend's attention in it. Nothing here schedules or samples, and importing this package imports
neither torch nor transformers.
"""

from hardpoint.layers.parallel import ParallelRank, Ranks
from hardpoint.models.adapter_layers import AdaptedLayer, adapted_layers, adapter_targets
from hardpoint.models.base import CapturableModel, RunnableModel
from hardpoint.models.loader import attention_layers, load_model
from hardpoint.models.pictures import PictureProcessor, as_picture, picture_processor, read_picture
from hardpoint.models.pooling import LabelActivation, PoolingDefaults
from hardpoint.models.registry import ARCHITECTURES, converted
from hardpoint.models.source import DEMO, LOAD_FORMATS, ModelFormat, ModelSource, open_model
from hardpoint.models.tokenizer import LightTokenizer, TokenizerBackend, load_tokenizer, panics_as_errors, write_chat
from hardpoint.weights.peft_adapters import Adapter, read_adapter

__all__ = [
    "ARCHITECTURES",
    "DEMO",
    "LOAD_FORMATS",
    "AdaptedLayer",
    "Adapter",
    "CapturableModel",
    "LabelActivation",
    "LightTokenizer",
    "ModelFormat",
    "ModelSource",
    "ParallelRank",
    "PictureProcessor",
    "PoolingDefaults",
    "Ranks",
    "RunnableModel",
    "TokenizerBackend",
    "adapted_layers",
    "adapter_targets",
    "as_picture",
    "attention_layers",
    "converted",
    "load_model",
    "load_tokenizer",
    "open_model",
    "panics_as_errors",
    "picture_processor",
    "read_adapter",
    "read_picture",
    "write_chat",
]
