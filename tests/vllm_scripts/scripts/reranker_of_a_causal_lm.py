"""A reranker that is a language model: its head from the rows of "no" and "yes" (Qwen3-Reranker)"""

from vllm import LLM

llm = LLM(
    model="tiny/reranker",
    runner="pooling",
    max_model_len=512,
    hf_overrides={
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    },
)
template = "{% for m in messages %}<{{ m.role }}>: {{ m.content }}{% endfor %}"
outputs = llm.score("What is the capital?", ["Paris.", "A fruit."], chat_template=template)
assert all(0 < output.outputs.score < 1 for output in outputs)
