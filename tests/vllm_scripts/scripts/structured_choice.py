"""Structured outputs: a choice of texts"""

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model="tiny/llama", max_model_len=128, structured_outputs_config={"backend": "auto"})
params = StructuredOutputsParams(choice=["Positive", "Negative"])
outputs = llm.generate("Classify: vLLM is wonderful!", SamplingParams(structured_outputs=params, max_tokens=20))
assert outputs[0].outputs[0].text in ("Positive", "Negative")
