"""An engine without a tokenizer"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", skip_tokenizer_init=True, max_model_len=64)
output = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, ignore_eos=True))[0]
assert len(output.outputs[0].token_ids) == 4
assert llm.get_tokenizer() is None
