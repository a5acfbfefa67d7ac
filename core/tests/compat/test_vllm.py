"""vLLM's names over this engine, without the libraries that use them; `tests/trl` has these."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import hardpoint
from hardpoint.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.compat.vllm.arguments import engine_settings
from hardpoint.interfaces.errors import ConfigError, EngineAsleep, InvalidRequest, SleepRefused
from hardpoint_conformance.tiny_model import Shape, tiny_model

SETTINGS = {"backend": "cpu", "dtype": "float32", "num_device_blocks": 16, "skip_tokenizer_init": True}
BY_TRL = {
    "tensor_parallel_size": 1,
    "max_num_seqs": None,
    "model_impl": "vllm",
    "distributed_executor_backend": "external_launcher",
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "trust_remote_code": False,
}
PROMPT = {"prompt_token_ids": [5, 9, 22, 7]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model(Shape()).path, enable_sleep_mode=True, **SETTINGS, **BY_TRL) as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model_impl": "transformers"}, "model_impl='transformers' is not supported"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"quantization": "bitsandbytes"}, "quantization"),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, "ranks of one engine"),
        (
            {"distributed_executor_backend": "mp", "data_parallel_size": 2, "data_parallel_backend": "ray"},
            "Ray cluster",
        ),
        ({"mm_processor_kwargs": {"size": 1}}, "preprocessor_config"),
        ({"allowed_media_domains": ["example.org"]}, "data: URLs"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "disable_any_whitespace"),
        ({"structured_outputs_config": {"backend": "auto", "reasoning_parser": "qwen3"}}, "after='</think>'"),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb is not supported"),
        ({"mamba_ssm_cache_dtype": "float32"}, "mamba_ssm_cache_dtype is not supported"),
    ],
)
def test_what_this_engine_does_not_do_is_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM("demo", **arguments)


def test_names_of_checkpoints_formats_ask_for_weights_as_they_are_stored() -> None:
    assert (
        engine_settings({"quantization": "awq"})
        == engine_settings({"quantization": "gguf"})
        == {"quantization": "auto"}
    )
    assert engine_settings({"quantization": "int8"}) == {"quantization": "int8"}


def test_arguments_of_absent_features_are_taken_where_they_ask_for_nothing() -> None:
    asked = {"data_parallel_hybrid_lb": False, "mamba_cache_dtype": "auto", "enable_return_routed_experts": False}
    assert engine_settings(asked | {"structured_outputs_config": {"backend": "auto", "reasoning_parser": ""}}) == {}


def test_parameters_are_copied_by_the_names_of_their_fields() -> None:
    """As outlines does it, with vLLM's structs of msgspec."""
    params = SamplingParams(temperature=0.5, stop="a", max_tokens=None)
    copied = {name: getattr(params, name) for name in params.__struct_fields__}
    assert SamplingParams(**copied | {"n": 2}) == SamplingParams(temperature=0.5, stop="a", max_tokens=None, n=2)


def test_command_lines_have_their_short_names_negations_and_lists() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    given = ["-tp", "2", "-q", "awq", "--no-async-scheduling", "--served-model-name", "a", "b"]
    args = EngineArgs.from_cli_args(parser.parse_args(given))
    assert (args.tensor_parallel_size, args.quantization, args.async_scheduling) == (2, "awq", False)
    assert args.served_model_name == ["a", "b"]


def test_outputs_are_numbered_and_embeddings_are_lists(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 2, SamplingParams(max_tokens=1), use_tqdm=False)
    first, second = (int(one.request_id) for one in outputs)
    assert second == first + 1
    (found,) = llm.embed([PROMPT], use_tqdm=False)
    assert len(json.loads(json.dumps(found.outputs.embedding))) == found.outputs.hidden_size
    with pytest.raises(InvalidRequest, match=r"PoolingParams\(truncate_prompt_tokens"):
        llm.embed([PROMPT], truncate_prompt_tokens=2)


def test_processed_log_probabilities_are_those_of_the_distribution_that_is_sampled_from(llm: LLM) -> None:
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=3, max_tokens=4, seed=1)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token
        possible = [one.logprob for one in entry.values() if math.isfinite(one.logprob)]
        assert len(possible) == 2
        assert sum(map(math.exp, possible)) == pytest.approx(1, abs=1e-4)


def test_a_trainer_writes_weights_one_by_one_through_the_engine_while_the_cache_sleeps(llm: LLM) -> None:
    def tokens() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)

    before = tokens()
    weights = dict(tiny_model(Shape()).weights)
    load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    for name, tensor in weights.items():
        assert load([(name, tensor.flip(0) if name == "model.norm.weight" else tensor)]) == {name}
    llm.reset_prefix_cache()
    llm.wake_up(tags=["kv_cache"])
    assert tokens() != before
    assert llm.collective_rpc("reload_weights") == [len(weights)]
    assert tokens() == before


def test_collective_rpc_calls_what_is_on_its_list_alone(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="cannot call 'shutdown'"):
        llm.collective_rpc("shutdown")
    with pytest.raises(InvalidRequest, match="no time limit"):
        llm.collective_rpc("reset_prefix_cache", timeout=3)
    with pytest.raises(
        InvalidRequest, match=r"'wake_up' with these arguments: got an unexpected keyword argument 'depth'"
    ):
        llm.collective_rpc("wake_up", kwargs={"depth": 1})
    with pytest.raises(SleepRefused, match="'depth' is not an argument of sleep"):
        llm.collective_rpc("sleep", kwargs={"depth": 1})
    with pytest.raises(InvalidRequest, match=r"'wake_up' with these arguments"):
        llm.collective_rpc("wake_up", args=None)  # type: ignore[arg-type]
    assert llm.collective_rpc("reset_prefix_cache") == [None]
    assert llm.llm_engine.model_config.max_model_len == Shape().max_len


def test_the_prefix_cache_is_reset_with_their_options_and_result(llm: LLM) -> None:
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False) is True
    assert llm.llm_engine.reset_prefix_cache() is True
    with pytest.raises(InvalidRequest, match="reset_running_requests is not supported"):
        llm.reset_prefix_cache(True)


def test_a_beam_search_takes_their_options(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    (expected,) = llm.beam_search([PROMPT], params)
    assert llm.beam_search([PROMPT], params, None, False, concurrency_limit=1) == [expected]
    with pytest.raises(InvalidRequest, match="enable_lora"):
        llm.beam_search([PROMPT], params, lora_request=hardpoint.LoRARequest("a", 1, "a"))


def test_outputs_have_their_fields_and_clocks(llm: LLM) -> None:
    before, started = time.time(), time.monotonic()
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert (output.lora_request, output.encoder_prompt, output.kv_transfer_params) == (None, None, None)
    assert (output.outputs[0].lora_request, output.outputs[0].routed_experts) == (None, None)
    metrics: Any = output.metrics
    assert metrics.num_generation_tokens == 3
    assert before <= metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time <= time.time()
    times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
    times = [started, *times, time.monotonic()]
    assert times == sorted(times)
    assert metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.queued_ts)
    assert pickle.loads(pickle.dumps(output)) == output

    # Of what is new in each step, tokens are counted together.
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("counted", PROMPT, params)
    counts = []
    while engine.has_unfinished_requests():
        counts += [one.metrics.num_generation_tokens for one in engine.step()]
    assert counts == [1, 2, 3]
    engine.add_request("pooled", PROMPT, hardpoint.PoolingParams())
    (pooled,) = [one for _ in iter(engine.has_unfinished_requests, False) for one in engine.step()]
    assert isinstance(pooled.outputs.data, torch.Tensor)


def test_what_is_not_here_is_refused_by_name_and_absent_for_who_asks(llm: LLM) -> None:
    parts = [llm, llm.llm_engine, llm.model_config, llm.llm_engine.model_executor, EngineArgs()]
    names = ["enqueue", "engine_core", "hf_config", "save_sharded_state", "create_engine_config"]
    for part, name in zip(parts, names, strict=True):
        assert not hasattr(part, name)
        with pytest.raises(InvalidRequest, match=f"Hardpoint has nothing for '{name}'"):
            getattr(part, name)
    assert llm.model_config.dtype is torch.float32
    with pytest.raises(AttributeError, match="no attribute 'typo'"):
        _ = llm.typo
    with pytest.raises(InvalidRequest, match="profile_prefix is not supported"):
        llm.start_profile(profile_prefix="x")
    with pytest.raises(InvalidRequest, match="data_2 must be a text or a list of texts"):
        llm.score("a", {"content": []})  # type: ignore[arg-type]


def test_a_pause_ends_with_the_tag_scheduling(llm: LLM) -> None:
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])
    assert not llm.is_sleeping()
    llm.sleep(level=1)
    with pytest.raises(EngineAsleep):
        llm.wake_up(tags=["scheduling"])
    llm.wake_up(tags=["weights", "kv_cache", "scheduling"])
    assert not llm.is_sleeping()


def test_settings_of_drafts_that_change_no_text_are_taken() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": None}
    taken = {"draft_tensor_parallel_size": 1, "enforce_eager": True, "parallel_drafting": False}
    assert engine_settings({"speculative_config": given | taken}) == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}
    }
    settings = engine_settings({"speculative_config": given | {"draft_tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match="'draft_tensor_parallel_size' is not a setting"):
        hardpoint.EngineConfig.from_arguments("demo", settings)


def test_an_awaited_engine_has_their_calls() -> None:
    async def calls() -> list[Any]:
        settings: Any = {"backend": "cpu", "num_gpu_blocks_override": 16, "skip_tokenizer_init": True}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=tiny_model(Shape()).path, **settings))
        try:
            found = [await engine.reset_prefix_cache(), await engine.collective_rpc("is_sleeping")]
            await engine.collective_rpc("sleep", args=(1,))
            found.append(await engine.is_sleeping())
            await engine.collective_rpc("wake_up", kwargs={"tags": ["weights", "kv_cache"]})
            with pytest.raises(InvalidRequest, match="cannot call 'shutdown'"):
                await engine.collective_rpc("shutdown")
            await engine.pause_generation(wait_for_inflight_requests=True)
            found.append(await engine.is_paused())
            await engine.wake_up(tags=["scheduling"])
            params = SamplingParams(max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            outputs = [one async for one in engine.generate(PROMPT, params, "one")]
            assert outputs[-1].metrics.num_generation_tokens == 2
            assert isinstance(outputs[-1], RequestOutput)
            found += [engine.is_running, engine.errored, engine.tokenizer, await engine.is_tracing_enabled()]
            with pytest.raises(InvalidRequest, match="nothing for 'vllm_config'"):
                _ = engine.vllm_config
            return found
        finally:
            engine.shutdown()

    assert asyncio.run(calls()) == [True, [False], True, True, True, False, None, False]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)


def test_a_script_that_imports_vllm_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
        import importlib.util, sys
        from beside import NAME
        assert importlib.util.find_spec("vllm") is not None
        from vllm import LLM, RequestOutput, SamplingParams
        from vllm.logprobs import Logprob
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.utils.network_utils import get_ip
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        try:
            get_ip()
        except Exception as error:
            print(error)
        def work(place):
            import vllm
            place.put(vllm.sampling_params.SamplingParams.__module__)
        if __name__ == "__main__":
            import multiprocessing, subprocess
            spawning = multiprocessing.get_context("spawn")
            place = spawning.SimpleQueue()
            spawned = spawning.Process(target=work, args=(place,))
            spawned.start()
            spawned.join()
            print("spawned", spawned.exitcode or place.get())
            child = "from vllm import LLM; print('child', LLM.__module__)"
            subprocess.run([sys.executable, "-c", child], check=True)
        print(LLM.__module__, __name__, NAME, sys.argv[1:])
        """)
    )
    done = _run("-m", "hardpoint.compat.vllm", str(script), "one", "--two")
    assert done.returncode == 0, done.stderr
    assert "a call of vLLM's get_ip" in done.stdout
    assert "child hardpoint.compat.vllm.llm" in done.stdout
    assert "spawned hardpoint.compat.vllm.requests" in done.stdout
    assert done.stdout.splitlines()[-1] == "hardpoint.compat.vllm.llm __main__ beside ['one', '--two']"


def test_vllm_that_was_imported_already_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint.compat.vllm import stand_in

    monkeypatch.setitem(sys.modules, "vllm", torch)
    with pytest.raises(ConfigError, match="imported already"):
        stand_in()
