"""The model goes on with the last message"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=128)
messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two,"}]
output = llm.chat(
    messages, SamplingParams(max_tokens=3), add_generation_prompt=False, continue_final_message=True, use_tqdm=False
)[0]
assert output.prompt.endswith("assistant: One, two,")
