"""Chat with pictures, as data: URLs and as objects"""

import base64
from io import BytesIO

from PIL import Image
from vllm import LLM, SamplingParams

llm = LLM("tiny/idefics3", max_model_len=256)
image, file = Image.new("RGB", (20, 16), "red"), BytesIO()
image.save(file, "PNG")
url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image_pil", "image_pil": image}]
outputs = [
    llm.chat(
        [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}],
        SamplingParams(max_tokens=4, seed=1),
    )
    for part in parts
]
assert outputs[0][0].outputs[0].text == outputs[1][0].outputs[0].text
