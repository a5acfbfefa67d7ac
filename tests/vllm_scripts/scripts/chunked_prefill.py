"""Long prompts in several steps, within a budget of tokens"""

from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=6)
prompt = "A long prompt of many words. " * 12
small = LLM("tiny/llama", max_model_len=512, enable_chunked_prefill=True, max_num_batched_tokens=32, max_num_seqs=8)
large = LLM("tiny/llama", max_model_len=512, max_num_batched_tokens=2048)
assert small.generate(prompt, params)[0].outputs[0].text == large.generate(prompt, params)[0].outputs[0].text
