"""An embedding of each token (multi-vector retrieval)"""

from vllm import LLM

llm = LLM(model="tiny/llama", runner="pooling", max_model_len=128)
(output,) = llm.encode(["Follow the white rabbit."], pooling_task="token_embed")
assert tuple(output.outputs.data.shape) == (len(output.prompt_token_ids), 64)
