"""Times of requests"""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.stats import RequestStateStats

llm = LLM("tiny/llama", max_model_len=64, disable_log_stats=False)
metrics = llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))[0].metrics
assert isinstance(metrics, RequestStateStats)
assert metrics.num_generation_tokens == 3
assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
