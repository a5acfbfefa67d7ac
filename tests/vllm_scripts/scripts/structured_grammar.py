"""Structured outputs: a grammar"""

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GRAMMAR = """
root ::= "SELECT " column " FROM " table
column ::= "id" | "name"
table ::= "users" | "orders"
"""
llm = LLM(model="tiny/llama", max_model_len=256)
params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=GRAMMAR), max_tokens=60)
words = llm.generate("A query:", params)[0].outputs[0].text.split()
assert words[0] == "SELECT"
assert words[1] in ("id", "name")
assert words[3] in ("users", "orders")
