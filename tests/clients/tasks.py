"""Tasks of lm-eval whose data are files: multiple choice, perplexity, generation."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    ("The capital of France is", ["Bananas", "Paris", "the city of Rome"], 1),
    ("Two plus two is", ["four", "a purple elephant", "seven"], 0),
    ("The sky on a clear day is", ["made of cheese", "blue", "loud"], 1),
    ("Water is made of", ["hydrogen and oxygen", "iron", "old shoes and paper"], 0),
]
TEXTS = [
    "The cat sat on the mat and looked out of the window.",
    "A long text is cut into windows. " * 20,  # longer than the context
    "Zürich — 4 °C.",
]
TASKS = {
    "capitals": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "goes_on": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12}
metric_list: [{metric: exact_match, ignore_case: true}]
""",
}


def write_task(folder: Path, name: str) -> None:
    """Write a task whose data are a file beside it."""
    data = {
        "capitals": [{"question": q, "choices": choices, "answer": right} for q, choices, right in QUESTIONS],
        "texts": [{"text": text} for text in TEXTS],
    }
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(map(json.dumps, data.get(name, data["capitals"]))))
    where = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
    (folder / f"{name}.yaml").write_text(where + TASKS[name])
