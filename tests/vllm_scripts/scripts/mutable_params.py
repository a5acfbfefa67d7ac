"""One object of sampling parameters, changed between calls"""

from vllm import LLM, SamplingParams

llm = LLM(model="tiny/llama", max_model_len=256)
params = SamplingParams(max_tokens=3, seed=1)
for length, temperature in ((2, 0.0), (4, 0.7), (6, 1.3)):
    params.max_tokens = length
    params.temperature = temperature
    assert len(llm.generate(["a"], params)[0].outputs[0].token_ids) == length
