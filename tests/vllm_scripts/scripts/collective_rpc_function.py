"""Functions of one's own on the workers"""

from vllm import LLM

llm = LLM("tiny/llama", max_model_len=64)
llm.collective_rpc(lambda worker: worker.rank)
