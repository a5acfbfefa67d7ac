"""Structured outputs under their former names"""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

llm = LLM(model="tiny/llama", max_model_len=128, guided_decoding_backend="xgrammar")
schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
guided = GuidedDecodingParams(json=schema)
text = llm.generate("JSON:", SamplingParams(guided_decoding=guided, max_tokens=60))[0].outputs[0].text
assert set(json.loads(text)) == {"a"}
