"""Tools in a chat, whose calls a grammar writes"""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "get_weather"}, "city": {"enum": ["Oslo", "Rome"]}},
    "required": ["name", "city"],
    "additionalProperties": False,
}


def get_weather(city):
    return f"sunny in {city}"


llm = LLM("tiny/llama", max_model_len=512)
messages = [{"role": "user", "content": "How is the weather?"}]
params = SamplingParams(max_tokens=80, structured_outputs=StructuredOutputsParams(json=CALL))
output = llm.chat(messages, sampling_params=params, tools=[TOOL])[0]
assert output.prompt.startswith("tool get_weather\n")
call = json.loads(output.outputs[0].text)
messages.append({"role": "assistant", "content": output.outputs[0].text})
messages.append({"role": "tool", "content": get_weather(call["city"])})
assert "sunny in" in llm.chat(messages, SamplingParams(max_tokens=4), tools=[TOOL])[0].prompt
