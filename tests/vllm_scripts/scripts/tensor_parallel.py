"""Two ranks of tensor parallelism on one machine"""

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("tiny/llama", tensor_parallel_size=2, max_model_len=64, distributed_executor_backend="mp")
    assert llm.get_world_size() == 2
    assert len(llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
    llm.shutdown()
