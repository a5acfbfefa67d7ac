"""A chat template of one's own, at the engine or at a call"""

from pathlib import Path

from vllm import LLM, SamplingParams

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

Path("template.jinja").write_text(TEMPLATE)
llm = LLM("tiny/llama", chat_template="template.jinja", max_model_len=256)
params = SamplingParams(max_tokens=2)
messages = [{"role": "user", "content": "Hi"}]
assert llm.chat(messages, params)[0].prompt == "[user]Hi[assistant]"
other = llm.chat(messages, params, chat_template="{{ messages[0].content }}!")
assert other[0].prompt == "Hi!"
