"""Labels of each token (named entities)"""

from vllm import LLM

llm = LLM(model="tiny/entities", runner="pooling", max_model_len=128)
(output,) = llm.encode(["Barack Obama visited Paris"], pooling_task="token_classify")
predictions = output.outputs.data.argmax(dim=-1)
assert predictions.shape == (len(output.prompt_token_ids),)
