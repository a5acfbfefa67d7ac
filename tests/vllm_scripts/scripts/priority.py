"""Requests by priority"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64, scheduling_policy="priority", max_num_seqs=1)
outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=8, ignore_eos=True), priority=[5, 0])
assert outputs[1].metrics.finished_time < outputs[0].metrics.finished_time
