"""The kinds of hostile input, by the name on the command line."""

from __future__ import annotations

# Whatever a case may import is imported here once, and not in each child.
import transformers.initialization
import transformers.integrations.gguf.gguf_tokenizer_mapping
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hardpoint.models import chat_template
from tests.warm_processes import import_engine

from . import configurations, models, requests
from .batches import Prepare

import_engine()
# A template that computes for ever is one case of many.
chat_template.MAX_SECONDS = 0.1

CORPORA: dict[str, Prepare] = {
    "models": models.prepare,
    "configurations": configurations.prepare,
    "requests": requests.prepare,
}
__all__ = ["CORPORA", "AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "transformers"]
