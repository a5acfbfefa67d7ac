"""Random weights of a model's shape"""

from vllm import LLM, SamplingParams

llm = LLM(model="tiny/llama", load_format="dummy", max_model_len=64, enforce_eager=True, dtype="half")
assert len(llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
