"""Models in GGUF files"""

from vllm import LLM, SamplingParams

llm = LLM(model="demo", tokenizer="demo", max_model_len=128, num_gpu_blocks_override=32)
output = llm.chat([{"role": "user", "content": "Say hi"}], SamplingParams(temperature=0, max_tokens=4))[0]
assert output.outputs[0].text
