"""Sounds in a chat"""

from vllm import LLM

llm = LLM("tiny/llama", max_model_len=64)
llm.chat([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}])
