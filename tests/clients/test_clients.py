"""Clients that others wrote, unmodified, against `hardpoint serve demo`; each in the release that constraints.txt names.

They live in an environment of their own: `make test-clients`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import dspy
import httpx
import outlines
import pytest
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import OpenAI as OpenAIClient
from pydantic import BaseModel, Field

from hardpoint_conformance.tiny_model import demo_file
from tests.server.test_command import command

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices otherwise

QUESTION, PROMPT = "What is the capital of France?", "The capital of France is"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with command("demo", device="cpu") as server:
        yield server.url()


@pytest.fixture(scope="module")
def expected(url: str) -> tuple[str, str]:
    """The answer to the question, and how the prompt goes on, as they come without any client."""
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 8}
    messages = [{"role": "user", "content": QUESTION}]
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked | {"messages": messages}, timeout=240).json()
    text = httpx.post(f"{url}/v1/completions", json=asked | {"prompt": PROMPT}, timeout=240).json()
    assert "Paris" in text["choices"][0]["text"]
    return answer["choices"][0]["message"]["content"], text["choices"][0]["text"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of commands that would look for models and data elsewhere."""
    home = tmp_path_factory.mktemp("home")
    return os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the demo model's tokenizer, as other projects read it."""
    from transformers import AutoTokenizer

    folder, file = tmp_path_factory.mktemp("tokenizer"), demo_file()
    assert file is not None
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
    return str(folder)


def run(*arguments: str, environment: dict[str, str]) -> None:
    """Run a command of this environment."""
    program = [sys.executable, "-m", *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_langchain(url: str, expected: tuple[str, str]) -> None:
    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": "demo"}
    chat = ChatOpenAI(temperature=0, max_tokens=8, **where)
    answer = chat.invoke(QUESTION)
    assert answer.content == expected[0]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(str(part.content) for part in chat.stream(QUESTION)) == expected[0]
    assert OpenAI(temperature=0, max_tokens=8, **where).invoke(PROMPT) == expected[1]
    vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **where).embed_documents(["x", "y"])
    assert [len(vector) for vector in vectors] == [576, 576]


def test_litellm(url: str, expected: tuple[str, str]) -> None:
    import litellm

    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(model="openai/demo", messages=messages, **where)
    assert answer.choices[0].message.content == expected[0]
    stream = litellm.completion(model="openai/demo", messages=messages, stream=True, **where)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == expected[0]
    text = litellm.text_completion(model="text-completion-openai/demo", prompt=PROMPT, **where)
    assert text.choices[0].text == expected[1]
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(model="openai/other", messages=messages, **where)


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_scores_through_local_completions(
    url: str, tokenizer: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """It reads the log probabilities of prompts: `echo` with `logprobs`."""
    items = [
        (PROMPT, ["Bananas", "Paris"], 1),
        ("Two plus two is", ["four", "purple"], 0),
        ("The sky is", ["loud", "blue"], 1),
    ]
    lines = [json.dumps({"question": q, "choices": choices, "answer": right}) for q, choices, right in items]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "capitals.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    model = f"model=demo,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=2,max_length=512"
    where = ["--tasks", "capitals", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    run("lm_eval", "run", "--model", "local-completions", "--model_args", model, *where, environment=environment)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == 1.0


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    city: str = Field(max_length=12)


def test_outlines(url: str) -> None:
    """Its model for vLLM's server: a JSON schema, a choice, a regular expression, and a stream of one."""
    client = OpenAIClient(base_url=f"{url}/v1", api_key="none")
    model = outlines.from_vllm(client, "demo")
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0}
    answer = model(f"{QUESTION} Answer in JSON.", Capital, **asked)
    assert isinstance(answer, str)
    assert Capital.model_validate_json(answer).country in ("France", "Italy")
    assert model(QUESTION, Literal["Rome", "Paris"], **asked) == "Paris"
    year = outlines.regex("[12][0-9]{3}")
    found = model("In which year did the First World War begin?", year, **asked)
    assert isinstance(found, str)
    assert re.fullmatch("[12][0-9]{3}", found)
    assert "".join(model.stream("In which year did the First World War begin?", year, **asked)) == found


def test_dspy(url: str) -> None:
    """A signature's fields as JSON, which the server holds to a schema: of a model that it does not know, dspy asks none itself."""

    class Answer(BaseModel):
        capital: Literal["Rome", "Paris"]

    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 64}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    model = dspy.LM("openai/demo", cache=False, num_retries=0, response_format=schema, **where)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> capital: Literal['Rome', 'Paris']")(question=QUESTION)
    assert answer.capital in ("Rome", "Paris")
    assert model.history[-1]["usage"]["completion_tokens"] > 0


GUIDELLM = (
    "run",
    "--profile=kind=concurrent,streams=2",
    "--constraint=kind=max_requests,count=6",
    "--data=kind=synthetic_text,prompt_tokens=16,output_tokens=8",
    "--disable-progress",
)


def check_guidellm(report: Path) -> None:
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)
    assert {one["output_tokens"] for one in benchmark["requests"]["successful"]} == {8}
    assert all(one["time_to_first_token_ms"] > 0 for one in benchmark["requests"]["successful"])


def test_guidellm(url: str, tokenizer: str, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    server = f"--backend=kind=openai_http,target={url}"
    where = [f"--tokenizer=kind=hf_auto,model={tokenizer}", f"--output=kind=json,path={file}"]
    run("guidellm", *GUIDELLM, server, *where, environment=environment)
    check_guidellm(file)


@pytest.mark.parametrize("kind", ["vllm_python", "vllm_python_batch"])
def test_guidellm_over_an_engine_of_vllms_interface(
    kind: str, tokenizer: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Its processes are spawned, and find vLLM's names there, too."""
    file = tmp_path / "report.json"
    program = Path(sys.executable).with_name("guidellm")
    engine = json.dumps({"kind": kind, "model": "demo", "vllm_config": {"max_model_len": 512, "device": "cpu"}})
    where = [f"--tokenizer=kind=hf_auto,model={tokenizer}", f"--output=kind=json,path={file}"]
    run("hardpoint.compat.vllm", str(program), *GUIDELLM, f"--backend={engine}", *where, environment=environment)
    check_guidellm(file)
