"""Structured outputs: a JSON schema of pydantic"""

from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class CarType(StrEnum):
    SEDAN = "SEDAN"
    TRUCK = "TRUCK"


class CarDescription(BaseModel):
    new: bool
    car_type: CarType


llm = LLM(model="tiny/llama", max_model_len=256)
params = SamplingParams(
    structured_outputs=StructuredOutputsParams(json=CarDescription.model_json_schema()), max_tokens=200, seed=3
)
output = llm.generate("Describe a car as JSON:", params)[0].outputs[0]
assert output.finish_reason == "stop"
print(CarDescription.model_validate_json(output.text))
