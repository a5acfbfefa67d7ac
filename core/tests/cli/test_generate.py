"""`hardpoint generate`: where prompts come from, what is printed where, and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint import SamplingParams


def test_the_answer_goes_to_standard_output_and_the_rest_to_standard_error(hp: Any, llms: Any) -> None:
    result = hp("generate", "--model", "demo", "--prompt", "hello", "--raw")
    assert (result.code, result.out) == (0, "HELLO\n")
    assert "acme (Acme One, simulated)" in result.err
    assert "30.0 tokens/s" in result.err


def test_the_summary_says_which_blocks_are_multiplied_by(hp: Any, prepare: Any) -> None:
    def formats(llm: Any) -> None:
        llm.info = replace(llm.info, weight_formats={"Q4_1": 210, "bfloat16": 3, "Q8_0": 1})

    prepare(formats)
    assert "matrices multiplied as blocks: 210 in Q4_1, 1 in Q8_0; load" in hp("generate", "-m", "demo", "-p", "a").err


def test_prompts_are_written_with_the_chat_template_where_the_model_has_one(hp: Any, llms: Any) -> None:
    assert hp("generate", "-m", "demo", "-p", "hi").out == "<USER>HI\n"
    assert hp("generate", "-m", "demo", "-p", "hi", "--system", "be").out == "<SYSTEM>BE<USER>HI\n"
    assert hp("generate", "-m", "demo", "-p", "hi", "--raw").out == "HI\n"


def test_prompts_are_passed_as_they_are_where_the_model_has_no_template(hp: Any, prepare: Any) -> None:
    def without_template(llm: Any) -> None:
        llm.tokenizer.chat_template = None

    prepare(without_template)
    assert hp("generate", "-m", "demo", "-p", "hi").out == "HI\n"


def test_a_system_message_without_template_is_a_usage_error(hp: Any) -> None:
    result = hp("generate", "-m", "demo", "-p", "hi", "--raw", "--system", "be")
    assert result.code == 2
    assert "--system" in result.err


def test_json_has_texts_tokens_reasons_backend_and_times(hp: Any, llms: Any) -> None:
    result = hp("generate", "--model", "demo", "-p", "ab", "--raw", "--logprobs", "1", "--json")
    report = json.loads(result.out)
    assert report["backend"] == {"name": "acme", "device": "Acme One", "simulated": True}
    assert report["model"]["name"] == "demo"
    (output,) = report["outputs"]
    assert output["prompt"] == "ab"
    assert output["prompt_token_ids"] == [97, 98]
    assert output["num_cached_tokens"] == 2
    (completion,) = output["completions"]
    assert (completion["text"], completion["token_ids"], completion["finish_reason"]) == ("AB", [65, 66], "length")
    assert completion["logprobs"][0] == [{"token_id": 65, "logprob": -0.5, "rank": 1, "text": "A"}]
    assert report["timings"]["load_seconds"] == 0.25
    assert report["timings"]["prefill_tokens_per_second"] == 200.0
    assert report["timings"]["decode_tokens_per_second"] == 30.0
    assert report["prefix_cache"] == {"queried_tokens": 100, "hit_tokens": 25, "hit_rate": 0.25}


def test_json_without_logprobs_has_none(hp: Any) -> None:
    (output,) = json.loads(hp("generate", "-m", "demo", "-p", "ab", "--json").out)["outputs"]
    assert "logprobs" not in output["completions"][0]


def test_several_prompts_and_completions_are_told_apart(hp: Any) -> None:
    result = hp("generate", "-m", "demo", "-p", "one [1]", "-p", "two", "--n", "2", "--raw")
    lines = ["> one [1] [0]", "ONE [1]", "> one [1] [1]", "ONE [1]", "> two [0]", "TWO", "> two [1]", "TWO"]
    assert result.out.splitlines() == lines


def test_standard_input_is_one_prompt(hp: Any, llms: Any) -> None:
    assert hp("generate", "-m", "demo", "--raw", stdin="two\nlines\n").out == "TWO\nLINES\n"


def test_a_file_has_a_prompt_per_line(hp: Any, llms: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  \ntwo\u2028half\r\n", encoding="utf-8")
    hp("generate", "-m", "demo", "--raw", "--prompts-file", str(file), "--json")
    assert llms[0].prompts == ["one", "two\u2028half"]


def test_a_jsonl_file_has_an_object_per_line(hp: Any, llms: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\\ntwo"}\n\n{"prompt": "three", "id": 3}\n')
    hp("generate", "-m", "demo", "--raw", "--prompts-file", str(file), "--json")
    assert llms[0].prompts == ["one\ntwo", "three"]


@pytest.mark.parametrize(("suffix", "line"), [(".txt", "one"), (".jsonl", '{"prompt": "one"}')])
def test_a_byte_order_mark_is_no_part_of_a_prompt(hp: Any, llms: Any, tmp_path: Path, suffix: str, line: str) -> None:
    file = tmp_path / f"prompts{suffix}"
    file.write_text(line, encoding="utf-8-sig")
    hp("generate", "-m", "demo", "--raw", "--prompts-file", str(file), "--json")
    assert llms[0].prompts == ["one"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}', "line 2"),
        (b"{", "line 1"),
        (b'["a"]', "line 1"),
        (b"[" * 100_000, "line 1"),
        (b"1" * 5_000, "line 1"),
        (b"\xff", "UTF-8"),
    ],
)
def test_bad_prompt_files_are_usage_errors_that_name_the_line(
    hp: Any, llms: Any, tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    result = hp("generate", "-m", "demo", "--prompts-file", str(file))
    assert result.code == 2
    assert says in result.err
    assert not llms


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-p", "x"],
        ["generate", "-m", "demo"],
        ["generate", "-m", "demo", "-p", "x", "--max-tokens", "many"],
        ["generate", "-m", "demo", "-p", "x", "--threads", "0"],
        ["generate", "-m", "demo", "--prompts-file", "missing.txt"],
        ["generate", "-m", "demo", "-p", "x", "--no-such-option"],
    ],
)
def test_wrong_usage_ends_with_2_before_a_model_is_loaded(hp: Any, llms: Any, arguments: list[str]) -> None:
    result = hp(*arguments)
    assert result.code == 2
    assert result.err
    assert not llms


def test_the_model_is_an_argument_or_an_option(hp: Any, llms: Any) -> None:
    assert hp("generate", "demo", "-p", "ab").code == 0
    assert hp("generate", "--model", "demo", "-p", "ab").code == 0
    assert [one.settings["model"] for one in llms] == ["demo", "demo"]
    for arguments, told in [((), "a model is needed"), (("demo", "-m", "demo"), "two models are given")]:
        result = hp("generate", *arguments, "-p", "ab")
        assert result.code == 2
        assert told in result.err


def test_prompt_and_file_exclude_each_other(hp: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    assert hp("generate", "-m", "demo", "-p", "x", "--prompts-file", str(tmp_path / "p.txt")).code == 2


def test_impossible_sampling_is_told_before_a_model_is_loaded(hp: Any, llms: Any) -> None:
    result = hp("generate", "-m", "demo", "-p", "x", "--top-p", "2")
    assert result.code == 1
    assert "top_p" in result.err
    assert "Traceback" not in result.err
    assert not llms


def test_a_prompt_that_cannot_be_served_ends_with_1_and_says_why(hp: Any, llms: Any) -> None:
    result = hp("generate", "-m", "demo", "-p", "x" * 501, "--raw")
    assert result.code == 1
    assert "501 tokens" in result.err
    assert "hint: Shorten it" in result.err
    assert llms[0].is_shut_down


def test_options_reach_the_engine_and_the_sampler(hp: Any, llms: Any) -> None:
    engine = "--backend acme --require-accelerator --dtype float16 --max-model-len 64 --block-size 32 --num-blocks 9"
    pictures = ["--limit-mm-per-prompt", '{"image": 2}', "--allowed-local-media-path", "here"]
    more = "--download-dir models --threads 2 --load-format dummy --no-prefix-caching --max-num-seqs 8 --max-num-batched-tokens 99"
    more += " --generation-config recommended"
    more += ' --runner generate --convert none --enable-prompt-embeds --hf-overrides {"num_labels":3}'
    more += ' --speculative-config {"method":"ngram"}'
    more += " --kv-offload-gib 2 --kv-offload-disk-gib 0.5 --kv-offload-path tiers"
    ranks = "--mixed-prefill-tokens 33 --tensor-parallel-size 2 --pipeline-parallel-size 3 --executor multi_process --engine-process"
    sampling = "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --stop x --stop y --max-tokens 3"
    hp(
        "generate",
        "-m",
        "demo",
        "-p",
        "abcdef",
        *engine.split(),
        *more.split(),
        *ranks.split(),
        *pictures,
        *sampling.split(),
        "--scheduling-policy",
        "shortest",
        "--ignore-eos",
    )
    settings = llms[0].settings
    assert settings == {
        "enable_prompt_embeds": True,
        "limit_mm_per_prompt": {"image": 2},
        "allowed_local_media_path": "here",
        "data_parallel_size": 1,
        "model": "demo",
        "backend": "acme",
        "require_accelerator": True,
        "dtype": "float16",
        "download_dir": "models",
        "max_model_len": 64,
        "block_size": 32,
        "num_device_blocks": 9,
        "threads": 2,
        "load_format": "dummy",
        "generation_config": "recommended",
        "runner": "generate",
        "convert": "none",
        "hf_overrides": {"num_labels": 3},
        "quantization": "auto",
        "speculative_config": {"method": "ngram"},
        "kv_offload_gib": 2.0,
        "kv_offload_disk_gib": 0.5,
        "kv_offload_path": "tiers",
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 99,
        "mixed_prefill_tokens": 33,
        "scheduling_policy": "shortest",
        "memory_utilization": None,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "executor": "multi_process",
        "engine_process": True,
        "trust_remote_code": False,
    }
    (params,) = llms[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.stop_texts, params.max_tokens, params.ignore_eos) == (3, ("x", "y"), 3, True)


def test_what_is_not_given_is_as_the_models_publisher_recommends(hp: Any, llms: Any, prepare: Any) -> None:
    hp("generate", "-m", "demo", "-p", "x", "--json")
    assert llms[-1].params == [SamplingParams(temperature=0.7, max_tokens=128)]
    recommended = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=3)
    prepare(lambda llm: setattr(llm, "recommended", recommended))
    hp("generate", "-m", "demo", "-p", "x", "--json")
    assert llms[-1].params == [recommended]
    hp("generate", "-m", "demo", "-p", "x", "--json", "--temperature", "0", "--top-k", "5")
    assert llms[-1].params == [recommended.clone(temperature=0.0, top_k=5)]


def test_every_engine_option_is_a_setting_of_the_engine(hp: Any, llms: Any) -> None:
    from hardpoint.engine.config import EngineConfig

    hp("generate", "-m", "demo", "-p", "x")
    settings = dict(llms[0].settings)
    EngineConfig.from_arguments(settings.pop("model"), settings)
