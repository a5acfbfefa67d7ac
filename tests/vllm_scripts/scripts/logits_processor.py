"""A function on the logits of a request"""

from vllm import LLM, SamplingParams


def only_even(token_ids, logits):
    logits[1::2] = float("-inf")
    return logits


llm = LLM("tiny/llama", max_model_len=64)
output = llm.generate("Hi", SamplingParams(max_tokens=10, logits_processors=[only_even]))[0].outputs[0]
assert all(token_id % 2 == 0 for token_id in output.token_ids)
