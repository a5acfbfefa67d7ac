"""What users of the engine rely on, with the demo model: outputs, streaming, stops, aborts, errors that leave others unharmed."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hardpoint import LLM, BeamSearchParams, SamplingParams
from hardpoint.interfaces.errors import (
    BackendNotFound,
    CapabilityRefused,
    ConfigError,
    EmptyPrompt,
    EngineDead,
    InvalidRequest,
    InvalidSamplingParams,
    KVCacheTooSmall,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    RequestNeverFits,
    SleepRefused,
    TokenOutOfRange,
    WorkerError,
)
from hardpoint.sampling import RequestOutputKind
from tests.e2e.conftest import drain
from tests.warm_processes import run_warm

TOKENS = {"prompt_token_ids": [5, 9, 22, 7]}
"""A prompt of the model without tokenizer."""


def test_generate_answers_with_text_tokens_and_a_reason(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    assert output.finished
    assert "Paris" in output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


def test_outputs_come_in_the_order_of_the_prompts_with_parameters_of_their_own(shallow_llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    outputs = shallow_llm.generate(["one two", "three four", "five six"], params)
    assert [o.prompt for o in outputs] == ["one two", "three four", "five six"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 2, 5]


@pytest.mark.parametrize("form", ["list", "mapping", "nested"])
def test_token_ids_are_a_prompt_in_every_form(llm: LLM, form: str) -> None:
    ids = llm.get_tokenizer().encode("The capital of France is")
    prompt: Any = {"list": ids, "mapping": {"prompt_token_ids": ids}, "nested": [ids]}[form]
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))
    assert output.prompt_token_ids == ids
    assert "Paris" in output.outputs[0].text


def test_a_generator_of_prompts_loses_none(shallow_llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = shallow_llm.generate((prompt for prompt in prompts), params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [
        o.outputs[0].text for o in shallow_llm.generate(prompts, params)
    ]


def test_a_conversation_in_text_parts_is_answered_as_one_in_text(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    plain = shallow_llm.chat([{"role": "user", "content": "What is 2+2?"}], params)
    parts = shallow_llm.chat([{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]}], params)
    assert parts[0].prompt == plain[0].prompt
    with pytest.raises(InvalidRequest, match="image_url"):
        shallow_llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], params)


def test_without_parameters_the_publishers_are_used(make_shallow: Any, tmp_path: Path) -> None:
    recommended = tmp_path / "generation_config.json"
    recommended.write_text('{"temperature": 0.0, "max_new_tokens": 3}')
    with make_shallow(generation_config=str(tmp_path)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        (completion,) = llm.generate(TOKENS)[0].outputs
        assert len(completion.token_ids) == 3
        assert len(llm.generate(TOKENS, SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids) == 5
    recommended.write_text('{"temperature": NaN}')
    with pytest.raises(ModelError, match=r"temperature must be a number.*nan.*generation_config='vllm'"):
        make_shallow(generation_config=str(tmp_path)).__enter__()


def test_texts_end_by_the_tokenizer_that_is_given_which_needs_no_weights(
    make_engine: Any, shallow: Any, tmp_path: Path
) -> None:
    words = {word: index for index, word in enumerate(["<unk>", *"abcdefgh", "<end>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), eos_token="<end>"
    )
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(Path(shallow.path) / "config.json", tmp_path)
    with make_engine(shallow.path, tokenizer=str(tmp_path)) as llm:
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=5, allowed_token_ids=[words["<end>"]]))
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [words["<end>"]])


def test_a_conversation_is_written_by_the_models_template_and_ends_at_end_of_text(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is 2+2? Answer with one number."}],
        SamplingParams(temperature=0, max_tokens=60),
    )
    assert "<|im_start|>user" in output.prompt
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert "<|im_end|>" not in output.outputs[0].text


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_streamed_text_adds_up_to_the_final_text(shallow_llm: LLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (expected,) = shallow_llm.generate("Write emoji: 🌍🚀 and 你好. More emoji:", params)
    shallow_llm.engine.add_request("s", "Write emoji: 🌍🚀 and 你好. More emoji:", params.clone(output_kind=kind))
    outputs = drain(shallow_llm.engine)["s"]
    assert len(outputs) > 10
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = [o.outputs[0].text for o in outputs]
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    if kind is RequestOutputKind.DELTA:
        assert "".join(texts) == expected.outputs[0].text
        assert list(itertools.chain(*tokens)) == list(expected.outputs[0].token_ids)
    else:
        assert texts[-1] == expected.outputs[0].text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_a_stream_of_deltas_is_the_whole_completion_and_ends_when_it_is_left(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    (whole,) = shallow_llm.generate("The capital of France is", params)
    outputs = list(shallow_llm.stream("The capital of France is", params))
    assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    for _ in shallow_llm.stream("Once upon a time", params):
        break
    assert shallow_llm.engine.get_num_unfinished_requests() == 0
    with pytest.raises(EmptyPrompt):
        shallow_llm.stream("", params)  # before the first output is asked for


def test_a_stop_string_ends_the_text_before_it(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = "Count: one, two, three, four,"
    full = shallow_llm.generate(prompt, params)[0].outputs[0].text
    stop = full[len(full) // 2 :][:5]
    (output,) = shallow_llm.generate(prompt, params.clone(stop=[stop]))
    assert output.outputs[0].text == full[: full.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    (kept,) = shallow_llm.generate(prompt, params.clone(stop=[stop], include_stop_str_in_output=True))
    assert kept.outputs[0].text == full[: full.index(stop)] + stop


def test_a_stop_token_ends_the_sequence_and_is_named(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tokens = list(shallow_llm.generate("Once upon a time", params)[0].outputs[0].token_ids)
    stop = tokens[6]
    (output,) = shallow_llm.generate("Once upon a time", params.clone(stop_token_ids=[stop]))
    assert list(output.outputs[0].token_ids) == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].stop_reason == stop


def test_n_completions_of_one_prompt_are_indexed_and_differ(shallow_llm: LLM) -> None:
    (output,) = shallow_llm.generate(
        "My favourite animal is", SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12)
    )
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len({o.text for o in output.outputs}) > 1


def test_best_of_returns_the_most_probable_of_the_sampled(shallow_llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, logprobs=0, ignore_eos=True)
    (every,) = shallow_llm.generate("My favourite animal is", params)
    (best,) = shallow_llm.generate("My favourite animal is", params.clone(n=1, best_of=4))
    ranked = sorted(every.outputs, key=lambda o: o.cumulative_logprob, reverse=True)
    assert best.outputs[0].token_ids == ranked[0].token_ids
    assert len(best.outputs) == 1


def test_logprobs_are_those_of_the_sampled_token_and_the_best(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    completion = shallow_llm.generate("The capital of France is", params)[0].outputs[0]
    assert len(completion.logprobs) == 5
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token_id].rank == 1
        assert len(entries) == 3
        assert entries[token_id].logprob == max(e.logprob for e in entries.values()) <= 0
    assert math.isclose(
        completion.cumulative_logprob,
        sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)),
        rel_tol=1e-6,
    )


def test_embeddings_are_the_oracles_normalised_hidden_states_whatever_the_batch(llm: LLM, oracle_float32: Any) -> None:
    texts = ["The cat sat on the mat.", "A kitten rests on a rug.", "Quarterly revenue rose by 4 %."]
    outputs = llm.embed(texts)
    alone = [llm.embed(text)[0].outputs.embedding for text in texts]
    for output, single in zip(outputs, alone, strict=True):
        with torch.inference_mode():
            hidden = oracle_float32.model.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        np.testing.assert_allclose(single, output.outputs.embedding, atol=1e-5)


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on(shallow_llm: LLM) -> None:
    engine = shallow_llm.engine
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2)
    expected = [o.token_ids for o in shallow_llm.generate("The capital of France is", params)[0].outputs]
    engine.add_request("stays", "The capital of France is", params)
    engine.add_request("goes", "Once upon a time", params)
    engine.add_request("never starts", "Dear Sir", params)
    engine.abort_request("never starts")
    for _ in range(3):
        engine.step()
    engine.abort_request(["goes", "unknown"])
    outputs = drain(engine)
    assert list(outputs) == ["stays"]
    assert [o.token_ids for o in outputs["stays"][-1].outputs] == expected
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        pytest.param("", EmptyPrompt, id="empty-text"),
        pytest.param([[]], EmptyPrompt, id="empty-token-list"),
        pytest.param({"prompt_token_ids": [1] * 1024}, PromptTooLong, id="no-room-for-a-token"),
        pytest.param({"prompt_token_ids": [5, 49152]}, TokenOutOfRange, id="beyond-the-vocabulary"),
        pytest.param({"prompt_token_ids": [5, -1]}, TokenOutOfRange, id="negative-token"),
        pytest.param({"prompt_token_ids": [5, 2.5]}, InvalidRequest, id="not-an-integer"),
        pytest.param({"text": "x"}, InvalidRequest, id="unknown-form"),
    ],
)
def test_a_bad_prompt_is_one_typed_error_and_the_engine_goes_on(llm: LLM, prompt: Any, error: type[Exception]) -> None:
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("good", "The capital of France is", params)
    engine.step()
    with pytest.raises(error):
        llm.generate(prompt, params)
    with pytest.raises(error):
        engine.add_request("bad", prompt if not isinstance(prompt, list) else prompt[0], params)
    assert len(drain(engine)["good"][-1].outputs[0].token_ids) == 4


def test_bad_parameters_are_typed_errors_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids"):
        llm.generate("x", SamplingParams(stop_token_ids=[10**6]))
    with pytest.raises(InvalidSamplingParams, match="completions"):
        llm.generate("x", SamplingParams(n=300))
    with pytest.raises(ConfigError, match="2 sampling parameters for 1 prompts"):
        llm.generate("x", [SamplingParams(), SamplingParams()])
    assert not llm.engine.has_unfinished_requests()


def test_a_request_id_in_use_is_refused(shallow_llm: LLM) -> None:
    shallow_llm.engine.add_request("twice", "x", SamplingParams())
    with pytest.raises(InvalidRequest, match="twice"):
        shallow_llm.engine.add_request("twice", "y", SamplingParams())
    shallow_llm.engine.abort_request("twice")


def test_a_failing_worker_ends_its_step_and_the_engine_serves_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("lost", "Once upon a time", params)
    engine.step()
    executor = engine._loop.core.executor

    def fail(step: Any) -> Any:
        raise RuntimeError("device fell off")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", fail)
        with pytest.raises(WorkerError, match="device fell off"):
            engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.stats().blocks_used == 0
    assert "Paris" in llm.generate("The capital of France is", params)[0].outputs[0].text


def test_a_prompt_larger_than_the_kv_pool_is_never_admitted(make_shallow: Any) -> None:
    with make_shallow(num_device_blocks=2, block_size=16, max_model_len=512) as llm:
        with pytest.raises(RequestNeverFits):
            llm.generate({"prompt_token_ids": [5] * 40})
        assert llm.generate(TOKENS, SamplingParams(max_tokens=3))[0].finished


@pytest.mark.parametrize(
    ("model", "settings", "error", "text"),
    [
        pytest.param("/no/such/model", {}, ModelNotFound, "/no/such/model", id="unknown-model"),
        pytest.param("demo", {"backend": "abacus"}, BackendNotFound, "abacus", id="unknown-backend"),
        pytest.param("demo", {"block_size": 24}, CapabilityRefused, "block size 24", id="block-size"),
        pytest.param("demo", {"max_model_len": 10**6}, ConfigError, "max_model_len", id="context-beyond-the-models"),
        pytest.param(
            "shallow",
            {"memory_utilization": 1e-6},
            KVCacheTooSmall,
            r"(?s)beside \d+ bytes of weights: \d+ bytes are missing.*raise memory_utilization to 0\.\d+ or more$",
            id="no-memory-for-kv",
        ),
        pytest.param("demo", {"dtype": "int7"}, ConfigError, "int7", id="unknown-dtype"),
        pytest.param("demo", {"kv_dtype": "float8_e5m2"}, CapabilityRefused, "float8_e5m2", id="kv-dtype"),
        pytest.param("demo", {"no_such_setting": 1}, ConfigError, "no_such_setting", id="unknown-setting"),
        pytest.param("demo", {"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size=0", id="no-ranks"),
        pytest.param(
            "demo", {"tensor_parallel_size": 4096}, CapabilityRefused, "4096 tensor-parallel", id="world-size"
        ),
        pytest.param(
            "demo",
            {"pipeline_parallel_size": 2, "executor": "in_process"},
            ConfigError,
            "one process",
            id="ranks-inside",
        ),
        pytest.param("demo", {"executor": "abacus"}, ConfigError, "multi_process", id="unknown-executor"),
        pytest.param("demo", {"rank_limits": {"nap": 1}}, ConfigError, "'nap'", id="unknown-limit"),
    ],
)
def test_an_impossible_engine_is_one_typed_error(
    model: str, settings: dict[str, Any], error: type[Exception], text: str, shallow_demo: str
) -> None:
    with pytest.raises(error, match=text):
        LLM(shallow_demo if model == "shallow" else model, **({"backend": "cpu"} | settings))


def test_settings_are_understood_under_the_names_of_other_engines() -> None:
    from hardpoint import EngineConfig

    config = EngineConfig.from_arguments("demo", {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 7})
    assert (config.memory_utilization, config.num_device_blocks) == (0.5, 7)
    names = {"mp": "multi_process", "uni": "in_process", "ray": "ray", None: "auto", "in_process": "in_process"}
    for theirs, ours in names.items():
        assert EngineConfig.from_arguments("demo", {"distributed_executor_backend": theirs}).executor == ours


def test_metrics_are_those_of_the_requests_and_of_the_engine(make_shallow: Any) -> None:
    with make_shallow() as llm:
        llm.generate([TOKENS, TOKENS], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
        llm.engine.add_request(
            "a", TOKENS, SamplingParams(max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        )
        drain(llm.engine)
        metrics = {one.name.removeprefix("hardpoint:"): one for one in llm.get_metrics()}
        (found,) = llm.beam_search([TOKENS], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
        assert [len(one.tokens) for one in found.sequences] == [8, 8]
        later = {one.name.removeprefix("hardpoint:"): one for one in llm.get_metrics()}
    assert later["request_success"].value == 7
    assert (later["request_generation_tokens"].count, later["request_generation_tokens"].sum) == (4, 31)
    assert metrics["generation_tokens"].value == 23
    assert metrics["request_success"].value == 5
    assert metrics["request_success"].labels == {"model_name": llm.engine.config.model, "finished_reason": "length"}
    lengths = metrics["request_generation_tokens"]
    assert (lengths.count, lengths.sum) == (3, 23)
    assert [lengths.buckets[limit] for limit in ("2", "5", "10", "+Inf")] == [0, 1, 3, 3]
    assert 0 < metrics["time_to_first_token_seconds"].sum < metrics["e2e_request_latency_seconds"].sum
    # A prompt waits once, also for several completions.
    assert metrics["request_queue_time_seconds"].count == 3
    assert metrics["kv_cache_usage_perc"].value == 0


FORKED = """
import asyncio, os, signal, sys
from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.interfaces.errors import ForkedProcess

def tokens(llm):
    return llm.generate({"prompt_token_ids": [5, 9, 22, 7]}, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids

async def awaited(llm):
    return [output async for output in llm.generate({"prompt_token_ids": [5, 9, 22, 7]})]

settings = {"backend": "cpu", "dtype": "float32", "num_device_blocks": 16, "threads": 2}
llm, waited = LLM(sys.argv[1], **settings), AsyncLLM(sys.argv[1], **settings)
expected = tokens(llm)
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        asyncio.run(awaited(waited))
    except ForkedProcess as error:
        print(error, flush=True)
    waited.shutdown()
    print(tokens(LLM(sys.argv[1], **settings)) == expected, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], tokens(llm) == expected)
waited.shutdown()
"""


def run_program(folder: Path, program: str, *arguments: str) -> str:
    """Run a program in a process of its own, and return what it prints."""
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, "-P", str(file), *arguments]
    done = run_warm(command, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_makes_engines_of_its_own_and_is_refused_its_parents(shallow_demo: str, tmp_path: Path) -> None:
    """Threads are not there after a fork: neither the engine's, which would not answer, nor those of torch's operators."""
    assert run_program(tmp_path, FORKED, shallow_demo).splitlines() == [
        "the engine belongs to the process that started it. Make an engine in this one",
        "True",
        "0 True",
    ]


def test_a_profile_is_a_file_of_what_the_rank_did(
    make_shallow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARDPOINT_PROFILE_DIR", raising=False)
    with make_shallow() as llm:
        with pytest.raises(InvalidRequest, match="HARDPOINT_PROFILE_DIR"):
            llm.start_profile()
        with pytest.raises(InvalidRequest, match="no profile is being recorded"):
            llm.stop_profile()
        (tmp_path / "file").touch()
        with pytest.raises(InvalidRequest, match="cannot be written to"):
            llm.start_profile(str(tmp_path / "file" / "x"))
        monkeypatch.setenv("HARDPOINT_PROFILE_DIR", str(tmp_path / "profiles"))
        # As where nothing has imported torch's compiler yet, which takes a second.
        monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
        monkeypatch.delitem(vars(torch), "_inductor", raising=False)
        llm.start_profile()
        assert "torch._inductor" not in sys.modules
        with pytest.raises(InvalidRequest, match="recorded already"):
            llm.start_profile()
        llm.generate(TOKENS, SamplingParams(max_tokens=2))
        (file,) = llm.stop_profile()
        events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
        assert any(str(event.get("name", "")).startswith("aten::") for event in events)
        assert list((tmp_path / "profiles").iterdir()) == [Path(file)]
        llm.start_profile()


def test_an_argument_that_a_call_does_not_have_is_one_typed_error(make_shallow: Any) -> None:
    with make_shallow() as llm:
        for call, told in (
            (
                lambda: llm.generate(TOKENS, sampling_parms=None),
                "not an argument of generate. Did you mean 'sampling_params'",
            ),
            (
                lambda: llm.generate(TOKENS, structured_outputs={"regex": "a"}),
                r"SamplingParams\(structured_outputs=...\)",
            ),
            (lambda: llm.chat([], chat_templat=""), "Did you mean 'chat_template'"),
            (lambda: llm.embed(TOKENS, poolin_params=None), "Did you mean 'pooling_params'"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                call()
        with pytest.raises(SleepRefused, match=r"'levl' is not an argument of sleep. Did you mean 'level'"):
            llm.sleep(levl=1)


@pytest.mark.parametrize(("has_cache", "times"), [(True, 1), (False, 2)])
def test_a_backend_that_is_passed_over_is_said_once_on_a_machine_that_can_note_it(
    make_shallow: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    has_cache: bool,
    times: int,
) -> None:
    from hardpoint.engine import startup

    if not has_cache:
        (tmp_path / "hardpoint").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = startup.resolve_backend
    passed = "abacus is unavailable (no beads): using cpu instead"
    monkeypatch.setattr(startup, "resolve_backend", lambda *a, **k: dataclasses.replace(real(*a, **k), notice=passed))
    for _ in range(2):
        with make_shallow() as llm:
            assert llm.info.notice == passed
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "hardpoint"]
    assert said == times * [("WARNING", passed)]


def test_a_shut_down_engine_says_so(make_shallow: Any) -> None:
    with make_shallow() as llm:
        pass
    llm.shutdown()
    with pytest.raises(EngineDead):
        llm.generate(TOKENS)


def test_two_engines_live_side_by_side(llm: LLM, make_shallow: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    with make_shallow(dtype="bfloat16") as other:
        (expected,) = other.generate(TOKENS, params)
        assert "Paris" in llm.generate("The capital of France is", params)[0].outputs[0].text
        assert other.generate(TOKENS, params)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert "Paris" in llm.generate("The capital of France is", params)[0].outputs[0].text


MADE_AND_ENDED = """
import ctypes, gc, resource, sys
from pathlib import Path
from hardpoint import LLM, SamplingParams

M_ARENA_MAX = -8
assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)

def use():
    with LLM(sys.argv[1], backend="cpu", skip_tokenizer_init=True, num_device_blocks=64) as llm:
        llm.generate([[1, 2, 3]] * 4, params)
        llm.sleep(level=1)
        llm.wake_up()
        llm.generate([[1, 2, 3]] * 4, params)

for number in range(12):
    use()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    print(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
"""


def test_engines_made_and_shut_down_one_after_the_other_leave_no_memory(shallow: Any, tmp_path: Path) -> None:
    """In a process of its own, with one arena of the C library, so that what is resident is exact to some 100 KiB."""
    resident = [int(line) for line in run_program(tmp_path, MADE_AND_ENDED, str(shallow.path)).split()]
    assert len(resident) == 12
    assert max(resident[5:]) - resident[4] < 3 << 20, resident


def test_each_completion_without_a_token_ends_alone(shallow_llm: LLM) -> None:
    """Forks of one prompt, which fail with the step that computes it; then the scheduler has nothing of them."""
    stops = list(range(shallow_llm.get_tokenizer().vocab_size))
    params = SamplingParams(n=3, temperature=0.9, min_tokens=1, stop_token_ids=stops, max_tokens=3)
    (output,) = shallow_llm.generate("Water boils at", params)
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert shallow_llm.engine.stats().blocks_used == 0
