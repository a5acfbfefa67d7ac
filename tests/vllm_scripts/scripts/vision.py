"""Pictures in prompts, also several, with names of their contents"""

from PIL import Image
from vllm import LLM, SamplingParams

llm = LLM("tiny/idefics3", max_model_len=256, limit_mm_per_prompt={"image": 2})
red, blue = Image.new("RGB", (20, 16), "red"), Image.new("RGB", (16, 30), "blue")
params = SamplingParams(temperature=0, max_tokens=4)
one = llm.generate({"prompt": "What is this? <image>", "multi_modal_data": {"image": red}}, params)[0]
two = {
    "prompt": "<image> or <image>?",
    "multi_modal_data": {"image": [red, blue]},
    "multi_modal_uuids": {"image": ["a", "b"]},
}
both = llm.generate(two, params)[0]
assert len(one.outputs[0].token_ids) > 0
assert len(both.prompt_token_ids) > len(one.prompt_token_ids)
