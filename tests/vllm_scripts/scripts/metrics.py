"""Metrics of the engine as values"""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM("tiny/llama", skip_tokenizer_init=True, disable_log_stats=False)
llm.generate([{"prompt_token_ids": [3, 5, 7]}] * 3, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))

found = {}
for metric in llm.get_metrics():
    if isinstance(metric, (Counter, Gauge)):
        found[metric.name] = metric.value
    elif isinstance(metric, Vector):
        found[metric.name] = metric.values
    elif isinstance(metric, Histogram):
        found[metric.name] = metric.count
        assert metric.buckets["+Inf"] == metric.count

assert found["vllm:generation_tokens"] == 12
assert found["vllm:num_requests_running"] == 0
assert found["vllm:request_success"] == found["vllm:time_to_first_token_seconds"] == 3
