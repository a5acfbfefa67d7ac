"""A file of OpenAI requests, answered as a batch"""

import json
from pathlib import Path

from vllm import LLM, SamplingParams

lines = [
    {
        "custom_id": f"request-{n}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": f"Hello {n}"}], "max_tokens": 4, "temperature": 0},
    }
    for n in range(3)
]
Path("requests.jsonl").write_text("\n".join(map(json.dumps, lines)))

requests = [json.loads(line) for line in Path("requests.jsonl").read_text().splitlines()]
bodies = [one["body"] for one in requests]
llm = LLM("tiny/llama", max_model_len=256)
params = [SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"]) for body in bodies]
answers = llm.chat([body["messages"] for body in bodies], params)
with Path("results.jsonl").open("w") as results:
    for one, answer in zip(requests, answers, strict=True):
        results.write(json.dumps({"custom_id": one["custom_id"], "text": answer.outputs[0].text}) + "\n")
assert len(Path("results.jsonl").read_text().splitlines()) == 3
