"""Several completions of a prompt"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
outputs = llm.generate("Hi", SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=7, ignore_eos=True))[0].outputs
assert [output.index for output in outputs] == [0, 1, 2]
assert len({tuple(output.token_ids) for output in outputs}) == 3
