"""LoRA adapters: equal to merged weights in mixed batches, apart in the prefix cache, within their budget, refused if unfit."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hardpoint import LLM, BeamSearchParams, LoRARequest, SamplingParams
from hardpoint.engine.commands import Sleep
from hardpoint.engine.sleep import SleepMode, SleepRequest
from hardpoint.interfaces.errors import (
    AdapterInUse,
    AdapterNotFound,
    ConfigError,
    EngineAsleep,
    InvalidAdapter,
    InvalidRequest,
    RequestNeverFits,
)
from tests.adapter_folders import adapter_tensors, merged, write_adapter
from tests.picture_models import save_picture_model
from tests.quantised_checkpoints import HIDDEN, dense_weights, write_folder

BASE = dense_weights()
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": [3 + i, 7, 9, 11, 50 + i]} for i in range(4)]
SETTINGS = {
    "backend": "cpu",
    "dtype": "float32",
    "num_device_blocks": 64,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
}


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **SETTINGS | settings)


def answers(llm: LLM, prompts: Sequence[Any] = PROMPTS, **arguments: Any) -> list[tuple[list[int], float]]:
    """Return the tokens of each prompt's completion, and their summed log probability."""
    found = [output.outputs[0] for output in llm.generate(prompts, GREEDY, **arguments)]
    return [(list(one.token_ids), one.cumulative_logprob or 0.0) for one in found]


def close(found: tuple[list[int], float], expected: tuple[list[int], float]) -> bool:
    return found[0] == expected[0] and math.isclose(found[1], expected[1], abs_tol=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the base model, three adapters of unlike ranks and layers, and each of them merged."""
    root = tmp_path_factory.mktemp("adapters")
    write_folder(root / "base", BASE)
    makes: list[tuple[dict[str, Any], dict[str, Any], float]] = [
        ({"rank": 4}, {}, 16 / 4),
        ({"rank": 8, "targets": ("q_proj", "v_proj")}, {"use_rslora": True}, 16 / math.sqrt(8)),
        (
            {"rank": 5, "targets": ("k_proj", "up_proj", "down_proj")},
            {"alpha_pattern": {"k_proj|up_proj|down_proj": 5}},
            1.0,
        ),
    ]
    for number, (shape, config, scale) in enumerate(makes):
        tensors = adapter_tensors(BASE, number, **shape)
        write_adapter(root / f"a{number}", tensors, **config)
        write_folder(root / f"merged{number}", merged(BASE, tensors, scale))
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], float]]:
    """Return what the base model makes of the first prompt, and each merged model of one of the others."""
    found = []
    for name, prompt in zip(["base", "merged0", "merged1", "merged2"], PROMPTS, strict=True):
        with engine(folder / name) as llm:
            found += answers(llm, [prompt])
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder / "base", enable_lora=True, max_loras=2, max_cpu_loras=3, enable_sleep_mode=True) as made:
        yield made


@pytest.fixture
def requests(folder: Path) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(f"a{number}", number + 1, str(folder / f"a{number}")) for number in range(3))]


def test_a_mixed_batch_is_equal_to_merged_weights(
    llm: LLM, requests: list[LoRARequest | None], expected: list[tuple[list[int], float]]
) -> None:
    assert llm.info.path == "fused"
    # More adapters than a step has room for: some requests wait for the others.
    found = answers(llm, lora_request=requests)
    assert [close(*pair) for pair in zip(found, expected, strict=True)] == [True] * 4, (found, expected)
    assert len({tuple(tokens) for tokens, _ in expected}) == 4


def test_a_beam_search_goes_through_an_adapter(folder: Path, llm: LLM, requests: list[LoRARequest | None]) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    found = llm.beam_search(PROMPTS[:2], params, lora_request=requests[:2])
    for output, prompt, name in zip(found, PROMPTS, ("base", "merged0"), strict=False):
        with engine(folder / name) as alone:
            (expected,) = alone.beam_search([prompt], params)
        assert [one.tokens for one in output.sequences] == [one.tokens for one in expected.sequences]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tensor-parallel"),
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param({"engine_process": True}, id="process"),
    ],
)
def test_adapters_over_ranks_and_processes(
    folder: Path, requests: list[LoRARequest | None], expected: list[tuple[list[int], float]], settings: dict[str, int]
) -> None:
    with engine(folder / "base", enable_lora=True, max_loras=3, **settings) as llm:
        assert llm.info.path == ("fused" if "engine_process" in settings else "modules")
        found = answers(llm, lora_request=requests)
        assert [close(*pair) for pair in zip(found, expected, strict=True)] == [True] * 4, (found, expected)
        with pytest.raises(InvalidAdapter, match="no folder of a LoRA adapter"):
            llm.load_adapter(LoRARequest("none", 9, str(folder)))


def test_guesses_of_the_base_model_change_nothing(
    folder: Path, requests: list[LoRARequest | None], expected: list[tuple[list[int], float]]
) -> None:
    itself = {"model": str(folder / "base"), "num_speculative_tokens": 3, "adaptive": False}
    with engine(folder / "base", enable_lora=True, max_loras=3, speculative_config=itself) as llm:
        found = answers(llm, lora_request=requests)
        assert [close(*pair) for pair in zip(found, expected, strict=True)] == [True] * 4, (found, expected)
        stats = llm.stats()
        # Of the request without an adapter all guesses are right, and of the others those that an adapter did not change.
        assert 6 <= stats.accepted_tokens < stats.draft_tokens


def test_prefixes_of_unlike_adapters_are_kept_apart(llm: LLM, requests: list[LoRARequest | None]) -> None:
    prompt = {"prompt_token_ids": list(range(10, 90))}
    alone = [answers(llm, [prompt], lora_request=one)[0] for one in requests[:2]]
    hits = llm.stats().prefix_hits
    again = [answers(llm, [prompt], lora_request=one)[0] for one in requests[:2]]
    assert llm.stats().prefix_hits > hits
    assert [close(*pair) for pair in zip(again, alone, strict=True)] == [True, True]
    assert alone[0][0] != alone[1][0]


def test_adapters_sleep_and_wake_with_the_engine(llm: LLM, requests: list[LoRARequest | None]) -> None:
    before = answers(llm, lora_request=requests)
    report = llm.sleep()
    assert "adapters" in report.tags
    llm.wake_up()
    assert [close(*pair) for pair in zip(answers(llm, lora_request=requests), before, strict=True)] == [True] * 4


def _nemotron_h(folder: Path) -> Any:
    """Write a tiny Nemotron H, whose checkpoints begin with other names than the modules, and return transformers' own."""
    shape = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    mixers = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 3}
    kinds = ["linear_attention", "mlp", "full_attention"]
    config = AutoConfig.for_model("nemotron_h", **shape, **mixers, num_key_value_heads=2, layers_block_type=kinds)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("write", "layers"),
    [
        pytest.param(_nemotron_h, (".0.mixer.in_proj", ".2.mixer.q_proj"), id="nemotron-h"),
        pytest.param(partial(save_picture_model, kind="qwen2_5_vl"), (".0.self_attn.q_proj",), id="qwen2.5-vl"),
    ],
)
def test_adapters_may_name_layers_as_transformers_has_them_in_memory(
    tmp_path: Path, write: Callable[[Path], Any], layers: tuple[str, ...]
) -> None:
    """PEFT names layers as the model that it trains does, whose names are not always those of its checkpoint."""
    model = write(tmp_path)
    changed = {name: one for name, one in model.named_modules() if name.endswith(layers)}
    stored = load_file(tmp_path / "model.safetensors")
    assert changed
    assert not stored.keys() & {f"{name}.weight" for name in changed}
    weights = {f"{name}.weight": one.weight for name, one in changed.items()}
    tensors = adapter_tensors(weights, 0, targets=[name.rpartition(".")[2] for name in layers])
    request = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", tensors, target_modules=sorted(changed))))
    with engine(tmp_path, enable_lora=True, max_model_len=64) as llm:
        (plain,), (found,) = answers(llm, PROMPTS[:1]), answers(llm, PROMPTS[:1], lora_request=request)
    prompt, tokens = PROMPTS[0]["prompt_token_ids"], found[0]
    with torch.no_grad():
        for name, one in changed.items():
            down, up = (tensors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            one.weight += 2.0 * up @ down
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    best = logits[len(prompt) - 1 : -1].max(-1)
    assert close(found, (best.indices.tolist(), float(best.values.sum())))
    assert plain[0] != tokens


def test_unloading(llm: LLM, folder: Path, requests: list[LoRARequest | None]) -> None:
    one = requests[1]
    assert one is not None
    stream = llm.stream(PROMPTS[1], GREEDY, lora_request=one)
    next(stream)
    with pytest.raises(AdapterInUse, match="1 requests in progress"):
        llm.unload_adapter("a0")
    assert list(stream)[-1].finished
    with pytest.raises(AdapterInUse, match="loaded from another folder"):
        llm.load_adapter(LoRARequest("a0", 1, str(folder / "a1")))
    llm.unload_adapter("a0")
    with pytest.raises(AdapterNotFound, match="no adapter 'a0'"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request="a0")
    with pytest.raises(AdapterNotFound, match="no adapter 'a0'"):
        llm.unload_adapter("a0")
    # The name is another adapter's from here on, whose prefixes and slots are its own.
    second = answers(llm, PROMPTS[1:2], lora_request=LoRARequest("a0", 1, str(folder / "a1")))
    assert close(second[0], answers(llm, PROMPTS[1:2], lora_request=requests[2])[0])
    llm.unload_adapter("a0")


def test_statistics_and_metrics_say_what_became_of_adapters(folder: Path, requests: list[LoRARequest | None]) -> None:
    named = [one for one in requests if one is not None]
    with engine(folder / "base", enable_lora=True, max_loras=1, max_cpu_loras=2) as llm:
        before = llm.stats().adapters
        assert (before.loaded, before.held, before.active, before.loads) == (0, 0, 0, 0)
        assert (before.max_held, before.max_active, before.device_bytes) == (2, 1, 0)
        assert before.device_budget == llm.sleep_status().memory["adapters"].allocated
        for one in named:
            llm.load_adapter(one)
        loaded = llm.stats().adapters
        assert (loaded.loaded, loaded.held, loaded.loads, loaded.evictions) == (3, 2, 3, 1)
        files = [folder / name / "adapter_model.safetensors" for name in ("a1", "a2")]
        sizes = [sum(4 * one.numel() for one in load_file(file).values()) for file in files]
        assert loaded.host_bytes == sum(sizes)
        stream = llm.stream(PROMPTS[1], GREEDY, lora_request=named[1])
        next(stream)
        # There is room for one adapter in a step, so that the other one's request waits.
        llm.engine.add_request("waiting", PROMPTS[2], GREEDY, lora_request=named[2])
        during = llm.stats().adapters
        assert (dict(during.running), dict(during.waiting)) == ({"a1": 1}, {"a2": 1})
        assert (during.active, during.device_bytes) == (1, during.device_budget)
        assert (llm.stats().running, llm.stats().waiting) == (1, 1)
        values = {(one.name, *one.labels.values()): one.value for one in llm.get_metrics() if "lora" in one.name}
        name = str(folder / "base")
        assert values["hardpoint:lora_requests_running", name, "a1"] == 1
        assert values["hardpoint:lora_requests_waiting", name, "a2"] == 1
        assert values["hardpoint:lora_requests_info", name, "1", "a1", "a2"] == pytest.approx(time.time(), abs=60)
        assert values["hardpoint:lora_host_bytes", name] == sum(sizes)
        list(stream)
        # What gave way is read again.
        answers(llm, PROMPTS[1:2], lora_request="a0")
        llm.unload_adapter("a1")
        after = llm.stats().adapters
        assert (after.loaded, after.held, after.loads, after.unloads, after.evictions) == (2, 2, 4, 1, 2)
        assert (dict(after.running), dict(after.waiting), after.active, after.device_bytes) == ({}, {}, 0, 0)
        values = {one.name: one.value for one in llm.get_metrics() if "lora" in one.name}
        assert values["hardpoint:lora_loads"] == 4
        assert values["hardpoint:lora_unloads"] == 1
        assert values["hardpoint:lora_evictions"] == 2


def test_a_request_that_waits_for_room_is_checked_before_and_ends_alone(
    folder: Path, requests: list[LoRARequest | None], tmp_path: Path
) -> None:
    """What can be known when it comes refuses it then; that its adapter cannot be read again is known when its turn comes."""
    _, first, *_ = requests
    assert first is not None
    lost = write_adapter(tmp_path / "lost", adapter_tensors(BASE, 3, rank=4))
    limits = {"max_loras": 1, "max_cpu_loras": 1, "num_device_blocks": 2, "block_size": 32, "max_model_len": 128}
    with engine(folder / "base", enable_lora=True, **limits) as llm:
        llm.load_adapter(first)
        expected = answers(llm, PROMPTS[1:2], lora_request="a0")[0][0]
        llm.load_adapter(LoRARequest("lost", 9, str(lost)))
        llm.engine.add_request("a0", PROMPTS[1], GREEDY, lora_request="a0")
        with pytest.raises(RequestNeverFits, match="100 tokens"):
            llm.engine.add_request("never", {"prompt_token_ids": [5] * 100}, GREEDY, lora_request="lost")
        llm.engine.add_request("lost", PROMPTS[2], GREEDY, lora_request="lost")
        shutil.rmtree(lost)
        outputs: list[Any] = []
        errors: list[str] = []
        while llm.engine.has_unfinished_requests():
            try:
                outputs += llm.engine.step()
            except InvalidAdapter as error:
                errors.append(str(error))
        assert [str(lost) in error for error in errors] == [True]
        assert {one.request_id: list(one.outputs[0].token_ids) for one in outputs} == {"a0": expected}
        assert not llm.stats().adapters.waiting


def test_requests_that_come_while_a_sleep_waits_keep_their_adapters(
    folder: Path, requests: list[LoRARequest | None]
) -> None:
    settings = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "sleeping_requests": "queue"}
    with engine(folder / "base", max_queued_while_asleep=3, **settings) as llm:
        names = ["a0", "a1", "a2"]
        expected = {}
        for name, prompt, one in zip(names, PROMPTS[1:], requests[1:], strict=True):
            assert one is not None
            llm.load_adapter(one)
            expected[name] = answers(llm, [prompt], lora_request=name)[0][0]
        llm.engine.add_request("a0", PROMPTS[1], GREEDY, lora_request="a0")
        slept = llm.engine._loop.submit(Sleep(SleepRequest(mode=SleepMode.WAIT)))
        for name, prompt in zip(names[1:], PROMPTS[2:], strict=True):
            llm.engine.add_request(name, prompt, GREEDY, lora_request=name)
        with pytest.raises(AdapterNotFound, match="nobody"):
            llm.engine.add_request("lost", PROMPTS[0], GREEDY, lora_request="nobody")
        with pytest.raises(AdapterInUse, match="1 requests in progress"):
            llm.unload_adapter("a2")
        outputs: list[Any] = []
        while not slept.done():
            outputs += llm.engine.step()
        assert slept.result().kept == 2
        # They count among those that wait, and so do requests that wait for their adapters.
        llm.engine.add_request("third", PROMPTS[1], GREEDY, lora_request="a1")
        with pytest.raises(EngineAsleep, match="3 requests are queued"):
            llm.engine.add_request("fourth", PROMPTS[1], GREEDY, lora_request="a1")
        llm.engine.abort_request("third")
        llm.wake_up()
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        assert {one.request_id: list(one.outputs[0].token_ids) for one in outputs if one.finished} == expected
        assert not llm.stats().adapters.waiting


def test_an_engine_without_adapters_says_so(folder: Path, requests: list[LoRARequest | None]) -> None:
    with engine(folder / "base") as llm, pytest.raises(InvalidAdapter, match="enable_lora=True"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=requests[1])


_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _changed(**changes: Any) -> dict[str, torch.Tensor]:
    tensors = adapter_tensors(BASE, 0, targets=("q_proj",))
    for name, value in changes.items():
        tensors[_Q if name == "q" else name] = value
    return tensors


BAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "other-width": (_changed(q=torch.zeros(8, HIDDEN + 1)), {}, "made for another model"),
    "other-layer": (_changed(**{_Q.replace("layers.0", "layers.9"): torch.zeros(8, HIDDEN)}), {}, "layers.9"),
    "nan": (_changed(q=torch.full((8, HIDDEN), torch.nan)), {}, "not finite"),
    "half-a-pair": ({_Q: torch.zeros(8, HIDDEN)}, {}, "not whole"),
    "too-large-a-rank": (adapter_tensors(BASE, 0, rank=17, targets=("q_proj",)), {}, "max_lora_rank=17"),
    "dora": (_changed(), {"use_dora": True}, "use_dora=True"),
    "dora-vector": (_changed(**{_Q.replace("lora_A", "lora_magnitude_vector"): torch.ones(HIDDEN)}), {}, "magnitude"),
    "biases": (_changed(), {"bias": "all"}, "biases"),
    "whole-modules": (_changed(), {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another-start": (_changed(), {"init_lora_weights": "pissa"}, "init_lora_weights"),
    "other-rank": (_changed(), {"r": 4}, "rank is not what"),
    "no-rank": (_changed(), {"r": 0}, "impossible values"),
    "alpha-of-text": (_changed(), {"lora_alpha": "16"}, "impossible values"),
    "missing-layers": (_changed(), {"target_modules": ["q_proj", "v_proj"]}, "nothing for"),
    "layers-beside": (_changed(), {"target_modules": ["v_proj"]}, "beside them"),
    "another-method": (_changed(), {"peft_type": "IA3"}, "IA3"),
    "bad-pattern": (_changed(), {"rank_pattern": {"(": 8}}, "no regular expression"),
    "nothing": ({}, {}, "no tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters_are_refused_and_others_served(llm: LLM, tmp_path: Path, kind: str) -> None:
    tensors, config, message = BAD[kind]
    write_adapter(tmp_path, tensors, **config)
    with pytest.raises(InvalidAdapter, match=message):
        llm.load_adapter(LoRARequest("bad", 1, str(tmp_path)))
    assert "bad" not in llm.engine.adapters()


def test_damaged_and_missing_files_are_refused(llm: LLM, tmp_path: Path) -> None:
    bad = LoRARequest("bad", 1, str(tmp_path))
    write_adapter(tmp_path, _changed())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 nothing")
    with pytest.raises(InvalidAdapter, match="damaged"):
        llm.load_adapter(bad)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapter, match="no adapter_model"):
        llm.load_adapter(bad)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        llm.load_adapter(bad)


def test_arguments_that_are_none_are_refused(llm: LLM, folder: Path) -> None:
    for wrong in (7, {"lora_name": "a"}, ["a0"], ""):
        with pytest.raises(InvalidRequest):
            llm.generate(PROMPTS[:2], GREEDY, lora_request=wrong)  # type: ignore[arg-type]
    for arguments in (("", 1, "x"), ("x", 0, "x"), ("x", 1, ""), ("x", "1", "x")):
        with pytest.raises(InvalidRequest):
            LoRARequest(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        engine(folder / "base", enable_lora=True, max_loras=3, max_cpu_loras=2)
