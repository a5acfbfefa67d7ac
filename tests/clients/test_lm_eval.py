"""lm-eval with our model class and with its own for transformers: the same scores of the demo model in float32, on local tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from hardpoint.compat.lm_eval import HardpointLM
from hardpoint.interfaces.errors import ConfigError, InvalidRequest, InvalidSamplingParams
from hardpoint_conformance.tiny_model import demo_file, read_demo
from tests.clients.tasks import TASKS, write_task
from tests.e2e.conftest import Oracle

CONTEXT = 96
BOUND = 1e-4
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    for name in TASKS:
        write_task(folder, name)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def ours() -> Iterator[HardpointLM]:
    model = HardpointLM("demo", backend="cpu", dtype="float32", max_model_len=CONTEXT, block_size=8)
    yield model
    model.llm.shutdown()


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    file = demo_file()
    assert file is not None
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    # All but the last token of a text are a model's input: theirs counts those alone.
    return HFLM(
        Oracle.of(read_demo(file)).model, tokenizer=tokenizer, max_length=CONTEXT - 1, device="cpu", batch_size=8
    )


def evaluated(model: Any, tasks: TaskManager, names: list[str], **how: Any) -> dict[str, Any]:
    found = simple_evaluate(model, tasks=names, task_manager=tasks, bootstrap_iters=0, **how)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (list(TASKS), {}),
        (["capitals", "goes_on"], {"apply_chat_template": True, "system_instruction": "Answer in one word."}),
    ],
    ids=["texts", "conversations"],
)
def test_scores_equal_those_of_transformers(
    names: list[str], how: dict[str, Any], ours: HardpointLM, theirs: HFLM, tasks: TaskManager
) -> None:
    found, expected = evaluated(ours, tasks, names, **how), evaluated(theirs, tasks, names, **how)
    for name in names:
        scores = {metric: value for metric, value in expected["results"][name].items() if isinstance(value, float)}
        assert scores
        for metric, value in scores.items():
            assert found["results"][name][metric] == pytest.approx(value, rel=BOUND, abs=BOUND), (name, metric)
        for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert [equal(*pair) for pair in zip(one["resps"], other["resps"], strict=True)] == [True] * len(
                one["resps"]
            )
    assert expected["results"]["capitals"]["acc,none"] > 0


def equal(answer: list[Any], reference: list[Any]) -> bool:
    """Texts are the same, and so are the judgements of what is most probable; log-likelihoods are within the bound."""
    if isinstance(reference[0], str):
        return answer == reference
    return bool(np.allclose(np.array(answer, float), np.array(reference, float), rtol=BOUND, atol=BOUND))


def test_a_context_is_computed_once_for_all_its_continuations(ours: HardpointLM) -> None:
    context = "Once upon a time, in a country far away, there was a king who had three daughters, and"
    before = ours.llm.stats().prefill_tokens
    requests = [
        Instance("loglikelihood", {}, (context, ending), 0) for ending in (" they", " the eldest of them", " he")
    ]
    ours.loglikelihood(requests[:1], disable_tqdm=True)
    first = ours.llm.stats().prefill_tokens - before
    ours.loglikelihood(requests[1:], disable_tqdm=True)
    assert ours.llm.stats().prefill_tokens - before < 2 * first


def test_it_is_found_by_its_name_and_takes_settings_as_text() -> None:
    from lm_eval.api.registry import get_model

    with pytest.raises(ConfigError, match="max_modle_len"):
        get_model("hardpoint").create_from_arg_string("pretrained=demo,max_modle_len=64", {"batch_size": 1})
    with pytest.raises(ConfigError, match="takes no device"):
        get_model("hardpoint").create_from_arg_string("pretrained=demo,device=cuda:1", {"device": "cuda:0"})


@pytest.mark.parametrize(
    ("asked", "error"),
    [({"max_gen_toks": CONTEXT}, InvalidRequest), ({"max_gen_toks": 4, "num_beams": 4}, InvalidSamplingParams)],
    ids=["more tokens than the context", "a parameter that is not ours"],
)
def test_what_cannot_be_generated_is_refused(asked: dict[str, Any], error: type[Exception], ours: HardpointLM) -> None:
    with pytest.raises(error):
        ours.generate_until([Instance("generate_until", {}, ("Once", {"until": [], **asked}), 0)])


def test_a_continuation_that_cannot_be_scored_is_refused(ours: HardpointLM) -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        ours.loglikelihood([Instance("loglikelihood", {}, ("Once", ""), 0)])
    with pytest.raises(InvalidRequest, match="does not fit the context"):
        ours.loglikelihood([Instance("loglikelihood", {}, ("Once", " upon" * CONTEXT), 0)])
