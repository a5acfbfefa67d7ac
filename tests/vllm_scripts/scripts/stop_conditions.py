"""Stop texts, stop tokens, least and most tokens"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
free = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
stop_id = free.token_ids[5]
place = list(free.token_ids).index(stop_id)
by_id = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id]))[
    0
].outputs[0]
assert by_id.stop_reason == stop_id
assert len(by_id.token_ids) == place + 1
word = free.text[4:6]
by_text = llm.generate(
    "Hi", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[word], include_stop_str_in_output=True)
)[0].outputs[0]
assert by_text.finish_reason == "stop"
assert by_text.text.endswith(word)
longer = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=12, min_tokens=10, stop_token_ids=[stop_id]))[
    0
].outputs[0]
assert len(longer.token_ids) >= 10
