"""Sampling parameters that the model recommends, changed in place"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=256)
params = llm.get_default_sampling_params()
params.temperature = 0.0
params.max_tokens = 5
outputs = llm.generate("Hello", params)
assert len(outputs[0].outputs[0].token_ids) == 5
assert llm.get_default_sampling_params().max_tokens == SamplingParams().max_tokens == 16
