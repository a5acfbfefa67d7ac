"""Mixtures of experts"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/mixtral", max_model_len=64, enable_expert_parallel=False)
assert len(llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids) == 6
