"""One engine in each process that a launcher started"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", tensor_parallel_size=1, distributed_executor_backend="external_launcher", max_model_len=64)
assert llm.get_world_size() == 1
assert len(llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
