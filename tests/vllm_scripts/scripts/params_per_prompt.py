"""Sampling parameters for each prompt"""

from vllm import LLM, SamplingParams

llm = LLM(model="tiny/llama", max_model_len=256)
many = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 4, 9)]
outputs = llm.generate(["x", "y", "z"], many)
assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 9]
