"""The same tokens in any batch, with seeds"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=128, seed=42)
params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=16, seed=11)
alone = llm.generate("The future of AI is", params)[0].outputs[0].token_ids
batch = llm.generate(["x", "The future of AI is", "a longer prompt than the others"], params)
assert batch[1].outputs[0].token_ids == alone
again = LLM("tiny/llama", max_model_len=128, seed=42)
assert again.generate("The future of AI is", params)[0].outputs[0].token_ids == alone
