"""Prompts as token ids, and tokens without text"""

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.inputs import TextPrompt

llm = LLM("tiny/llama", max_model_len=128)
ids = llm.get_tokenizer().encode("Hello there")
params = SamplingParams(temperature=0, max_tokens=5)
by_ids = llm.generate([TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids}], params)
by_text = llm.generate(TextPrompt(prompt="Hello there"), params)
assert {tuple(one.outputs[0].token_ids) for one in [*by_ids, *by_text]} == {tuple(by_text[0].outputs[0].token_ids)}
silent = llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(temperature=0, max_tokens=5, detokenize=False))
assert silent[0].outputs[0].text == ""
assert silent[0].outputs[0].token_ids == by_text[0].outputs[0].token_ids
