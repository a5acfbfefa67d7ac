"""Structured outputs: a regular expression"""

import re

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

REGEX = r"[a-z0-9.]{1,20}@[a-z]{3,10}\.com\n"
llm = LLM(model="tiny/llama", max_model_len=128)
params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=REGEX), stop=["\n"], max_tokens=50, seed=0)
text = llm.generate("An address:", sampling_params=params)[0].outputs[0].text
assert re.fullmatch(REGEX, text + "\n"), text
