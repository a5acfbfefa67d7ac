"""Messages whose content is a list of text parts"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=256)
parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
output = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=2))[0]
assert output.prompt == "user: One\nTwo\nassistant: "
