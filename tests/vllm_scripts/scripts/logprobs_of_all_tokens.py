"""Log probabilities of the whole vocabulary, before and after the parameters' changes"""

import math

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64, max_logprobs=-1, logprobs_mode="processed_logprobs")
(position,) = llm.generate("Hi", SamplingParams(temperature=0.7, max_tokens=1, logprobs=-1))[0].outputs[0].logprobs
assert len(position) == len(llm.get_tokenizer())
assert abs(sum(math.exp(one.logprob) for one in position.values()) - 1) < 1e-4
