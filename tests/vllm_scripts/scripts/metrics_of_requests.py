"""Times of requests"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64, disable_log_stats=False)
metrics = llm.generate("Hello", SamplingParams(max_tokens=3))[0].metrics
assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
