"""Models: finding one, reading its configuration, weights and tokenizer, and running its decoder.

A model runs by the first of three ways that can: a backend's fused decoder, the core's own lean decoder, transformers'
modelling code with the backend's attention in it. Nothing here schedules or samples, and importing this package imports
neither torch nor transformers.
"""

from hardpoint.models.base import RunnableModel
from hardpoint.models.families import LEAN_ARCHITECTURES, Place
from hardpoint.models.loader import attention_layers, load_model
from hardpoint.models.parallel import Ranks
from hardpoint.models.source import DEMO, LOAD_FORMATS, ModelFormat, ModelSource, open_model
from hardpoint.models.tokenizer import load_tokenizer

__all__ = [
    "DEMO",
    "LEAN_ARCHITECTURES",
    "LOAD_FORMATS",
    "ModelFormat",
    "ModelSource",
    "Place",
    "Ranks",
    "RunnableModel",
    "attention_layers",
    "load_model",
    "load_tokenizer",
    "open_model",
]
