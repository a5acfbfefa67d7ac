"""Profiles by torch's profiler"""

import os
import tempfile

folder = tempfile.mkdtemp()
os.environ["VLLM_TORCH_PROFILER_DIR"] = folder

from vllm import LLM, SamplingParams  # noqa: E402  # which reads the variable

llm = LLM("tiny/llama", skip_tokenizer_init=True)
llm.start_profile()
llm.generate([{"prompt_token_ids": [3, 5, 7]}], SamplingParams(max_tokens=2))
llm.stop_profile()
assert len(os.listdir(folder)) == 1
