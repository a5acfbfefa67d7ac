"""Sleep and wake on the CPU: the demo model's memory goes back, and the same tokens come, whatever happens in between."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from hardpoint import LLM, PoolingParams, SamplingParams
from hardpoint.engine.sleep import EngineState
from hardpoint.interfaces import Capabilities, Pooling, SleepPlan, SleepTier
from hardpoint.interfaces.errors import (
    BackupCorrupt,
    BackupStale,
    CapabilityRefused,
    ConfigError,
    CorruptWeights,
    DeviceOutOfMemory,
    DrainTimeout,
    DriverError,
    EngineAsleep,
    EngineDead,
    MemoryAsleep,
    MemoryBusy,
    ModelNotFound,
    ParticipantError,
    SleepRefused,
    UnknownTag,
    WeightsMissing,
)
from hardpoint.memory import DriverTable
from hardpoint.models import open_model
from hardpoint.sampling import RequestOutputKind
from hardpoint_cpu.driver import DriverFaults, driver_table
from tests.e2e.conftest import drain

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,"]
LONG = "Give three facts about the moon, and explain each of them in a sentence that a child understands. " * 3
TINY_PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 22, 7], [100, 3, 3], list(range(80)))]


class Subject:
    """An engine, its prompts, and the greedy tokens that it gives when nothing happens."""

    def __init__(self, llm: LLM, prompts: list[Any], params: SamplingParams) -> None:
        self.llm, self.prompts, self.params = llm, prompts, params
        self.expected = self.tokens()

    def tokens(self) -> list[list[int]]:
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def start(self, steps: int = 5, **changes: Any) -> None:
        """Begin all prompts, with their numbers as request ids, and compute some steps."""
        for number, prompt in enumerate(self.prompts):
            self.llm.engine.add_request(str(number), prompt, self.params.clone(**changes))
        for _ in range(steps):
            self.llm.engine.step()

    def last_tokens(self) -> list[list[int]]:
        """Serve all requests to their end and return what their last outputs hold."""
        outputs = drain(self.llm.engine)
        return [list(outputs[str(number)][-1].outputs[0].token_ids) for number in range(len(self.prompts))]

    def restore(self) -> None:
        """Leave the engine as it was made, also where a test failed."""
        llm = self.llm
        llm.wake_up()
        llm.sleep(level=0, mode="abort")
        llm.wake_up()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        if self.tokens_changed or not llm.sleep_status().weights_valid:
            llm.reload_weights()
        self.tokens_changed = False

    tokens_changed = False


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def the_demo(llm: LLM, greedy: Any) -> Subject:
    return Subject(llm, PROMPTS, greedy(12))


@pytest.fixture
def demo(the_demo: Subject) -> Iterator[Subject]:
    """The demo model in float32."""
    yield the_demo
    the_demo.restore()


@pytest.fixture(scope="module")
def the_small(shallow_llm: LLM, greedy: Any) -> Subject:
    return Subject(shallow_llm, PROMPTS, greedy(12))


@pytest.fixture
def small(the_small: Subject) -> Iterator[Subject]:
    """The demo model's first layers in float32, for what does not depend on how much memory there is."""
    yield the_small
    the_small.restore()


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a seeded model of tiny shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=128, **shape)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


def _tiny_engine(folder: Path, backups: Path, **settings: Any) -> LLM:
    common = {"dtype": "float32", "num_device_blocks": 16, "skip_tokenizer_init": True, "max_num_seqs": 8}
    return LLM(str(folder), backend="cpu", sleep_disk_directory=str(backups), **(common | settings))


@pytest.fixture(scope="module")
def the_tiny(tiny_files: Path, greedy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with _tiny_engine(tiny_files, tmp_path_factory.mktemp("backups")) as llm:
        yield Subject(llm, TINY_PROMPTS, greedy())


@pytest.fixture
def tiny(the_tiny: Subject) -> Iterator[Subject]:
    """A model of tiny shape, for what does not depend on the model."""
    yield the_tiny
    the_tiny.restore()


@pytest.fixture
def make_tiny(tiny_files: Path, tmp_path: Path, greedy: Any) -> Iterator[Callable[..., Subject]]:
    """Return what makes a tiny engine with settings, files and backups of its own."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_files, folder)
    made: list[LLM] = []

    def make(**settings: Any) -> Subject:
        made.append(_tiny_engine(folder, tmp_path / "backups", **settings))
        return Subject(made[-1], TINY_PROMPTS, greedy())

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def small_checkpoint(shallow_demo: str) -> dict[str, torch.Tensor]:
    source = open_model(shallow_demo)
    return {name: source.checkpoint.read(name) for name in source.checkpoint.shapes()}


@pytest.fixture(scope="module")
def checkpoint(tiny_files: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_files / "model.safetensors")


NORM = "model.norm.weight"


def _of_another_model(checkpoint: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights with which other tokens are the most probable: the last norm's channels are in another order."""
    for name, tensor in checkpoint.items():
        yield name, tensor.flip(0) if name == NORM else tensor


# Levels and tiers


@pytest.mark.parametrize("tier", ["disk", "source", "host"])
def test_level_1_gives_the_weights_memory_back_and_the_same_tokens_come_after(tier: str, demo: Subject) -> None:
    llm, weights = demo.llm, demo.llm.info.weight_bytes
    before = _resident()
    report = llm.sleep(level=1, tier=tier)
    assert llm.is_sleeping()
    assert report.asleep == {"weights", "buffers", "kv_cache", "default"}
    assert report.freed >= weights
    if tier != "host":  # the host's memory is this device's
        assert before - _resident() >= 0.99 * weights
    woken = llm.wake_up()
    assert (woken.state, woken.asleep, woken.weights_valid) == (EngineState.RUNNING, frozenset(), True)
    assert demo.tokens() == demo.expected


def test_a_second_sleep_of_unchanged_weights_copies_nothing(small: Subject) -> None:
    llm = small.llm
    llm.sleep(tier="disk")
    llm.wake_up()
    report = llm.sleep(tier="disk")
    assert report.memory is not None
    assert report.memory.skipped >= llm.info.weight_bytes
    assert report.memory.preserved < llm.info.weight_bytes // 100
    llm.wake_up()
    assert small.tokens() == small.expected


def test_level_2_serves_nothing_until_the_weights_are_loaded_again(demo: Subject) -> None:
    llm = demo.llm
    before = _resident()
    assert not llm.sleep(level=2).weights_valid
    assert before - _resident() >= 0.99 * llm.info.weight_bytes
    with pytest.raises(EngineAsleep):
        llm.generate(PROMPTS)
    with pytest.raises(MemoryAsleep):
        llm.reload_weights()
    assert llm.wake_up().state is EngineState.WEIGHTS_MISSING
    with pytest.raises(WeightsMissing, match="reload_weights"):
        llm.generate(PROMPTS)
    assert llm.sleep_status().missing_weights == llm.reload_weights() == 272
    assert demo.tokens() == demo.expected


def test_level_0_pauses(tiny: Subject) -> None:
    assert tiny.llm.sleep(level=0).memory is None
    with pytest.raises(EngineAsleep):
        tiny.tokens()
    tiny.llm.wake_up()
    assert tiny.tokens() == tiny.expected


def test_a_corrupt_backup_is_never_served_and_a_deeper_sleep_is_the_way_out(
    make_tiny: Callable[..., Subject], tmp_path: Path
) -> None:
    tiny = make_tiny()
    llm = tiny.llm
    llm.sleep(tier="disk")
    files = [path for path in (tmp_path / "backups").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x55" * 4096)
    with pytest.raises(BackupCorrupt):
        llm.wake_up()
    assert "weights" in llm.sleep_status().asleep
    assert llm.sleep(level=2).dropped == {"weights"}
    assert llm.wake_up().state is EngineState.WEIGHTS_MISSING
    llm.reload_weights()
    assert tiny.tokens() == tiny.expected


# Requests in progress


@pytest.mark.parametrize("arguments", [{"level": 0}, {"kv": "preserve"}, {"kv": "discard"}])
def test_kept_requests_continue_as_if_nothing_had_happened(arguments: dict[str, Any], small: Subject) -> None:
    llm = small.llm
    small.start(steps=5, output_kind=RequestOutputKind.DELTA)
    report = llm.sleep(mode="keep", **arguments)
    assert (report.kept, report.aborted) == (2, 0)
    with pytest.raises(EngineAsleep):
        llm.engine.step()
    llm.wake_up()
    outputs = drain(llm.engine)
    for number, tokens in enumerate(small.expected):
        rest = [token for output in outputs[str(number)] for token in output.outputs[0].token_ids]
        assert rest == tokens[5:]
    assert llm.stats().blocks_used == 0


@pytest.mark.parametrize("kv", ["preserve", "discard"])
def test_kept_completions_of_one_prompt_continue_each_for_itself(kv: str, tiny: Subject) -> None:
    llm, params = tiny.llm, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=16, ignore_eos=True)
    whole = [list(one.token_ids) for one in llm.generate(TINY_PROMPTS[2], params)[0].outputs]
    assert len(set(map(tuple, whole))) > 1
    llm.engine.add_request("n", TINY_PROMPTS[2], params)
    for _ in range(6):
        llm.engine.step()
    llm.sleep(mode="keep", kv=kv)
    llm.wake_up()
    output = drain(llm.engine)["n"][-1]
    assert [list(one.token_ids) for one in output.outputs] == whole


def test_a_kept_pooling_request_is_computed_from_its_beginning(make_tiny: Callable[..., Subject]) -> None:
    llm, params = make_tiny(max_num_batched_tokens=16).llm, PoolingParams(pooling=Pooling.MEAN)
    (whole,) = llm.embed(TINY_PROMPTS[2], params)
    llm.engine.add_pooling_request("e", TINY_PROMPTS[2], params)
    llm.engine.step()
    llm.sleep(mode="keep", tags="kv_cache")
    llm.wake_up()
    (output,) = drain(llm.engine)["e"]
    np.testing.assert_allclose(output.outputs.data, whole.outputs.embedding, atol=1e-6)


def test_aborted_requests_end_with_what_they_have(small: Subject) -> None:
    engine = small.llm.engine
    small.start(steps=5)
    engine.add_pooling_request("e", "no time left")
    engine.add_request("never began", PROMPTS[0], SamplingParams(n=2, best_of=3, temperature=1.0))
    assert small.llm.sleep(tags="kv_cache").aborted == 4
    outputs = {output.request_id: output for output in engine.step()}
    for number, tokens in enumerate(small.expected):
        completion = outputs[str(number)].outputs[0]
        assert (list(completion.token_ids), completion.finish_reason) == (tokens[:5], "abort")
        assert completion.text
        assert outputs[str(number)].finished
    assert outputs["e"].finish_reason == "abort"
    assert len(outputs["e"].outputs.data) == 0
    assert [one.finish_reason for one in outputs["never began"].outputs] == ["abort"] * 2
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineAsleep):
        engine.step()
    assert small.llm.stats().blocks_used == 0


def test_waiting_serves_all_requests_first(tiny: Subject) -> None:
    tiny.start()
    tiny.llm.sleep(mode="wait", tags="kv_cache")
    outputs = {output.request_id: output.outputs[0] for output in tiny.llm.engine.step()}
    assert [list(outputs[str(number)].token_ids) for number in range(3)] == tiny.expected
    assert {completion.finish_reason for completion in outputs.values()} == {"length"}


def test_requests_that_take_too_long_keep_the_engine_awake(tiny: Subject) -> None:
    tiny.start()
    with pytest.raises(DrainTimeout, match="3 in progress"):
        tiny.llm.sleep(mode="wait", drain_timeout=0)
    assert not tiny.llm.is_sleeping()
    assert tiny.last_tokens() == tiny.expected


def test_requests_are_rejected_while_the_engine_sleeps(tiny: Subject) -> None:
    tiny.llm.sleep(tags="kv_cache")
    with pytest.raises(EngineAsleep, match="wake_up"):
        tiny.llm.engine.add_request("late", TINY_PROMPTS[0], SamplingParams())
    with pytest.raises(EngineAsleep):
        tiny.llm.embed(TINY_PROMPTS[0])
    assert not tiny.llm.engine.has_unfinished_requests()


def test_requests_are_queued_up_to_the_limit(make_tiny: Callable[..., Subject]) -> None:
    tiny = make_tiny(sleeping_requests="queue", max_queued_while_asleep=3)
    for _ in range(2):
        tiny.llm.sleep(tags="kv_cache")
        tiny.start(steps=0)
        with pytest.raises(EngineAsleep, match="3 requests are queued"):
            tiny.llm.engine.add_request("one more", TINY_PROMPTS[0], tiny.params)
        tiny.llm.engine.abort_request("1")
        tiny.llm.engine.add_request("1", TINY_PROMPTS[1], tiny.params)
        tiny.llm.wake_up()
        assert tiny.last_tokens() == tiny.expected


def test_requests_that_an_earlier_sleep_queued_are_in_progress_later(
    make_tiny: Callable[..., Subject], checkpoint: dict[str, torch.Tensor]
) -> None:
    tiny = make_tiny(sleeping_requests="queue", max_queued_while_asleep=3)
    tiny.llm.sleep(tags="kv_cache")
    tiny.start(steps=0)
    tiny.llm.wake_up()
    tiny.llm.engine.step()
    with pytest.raises(CorruptWeights):
        tiny.llm.update_weights([(NORM, checkpoint[NORM]), ("nonsense", checkpoint[NORM])])
    assert tiny.llm.sleep_status().state is EngineState.WEIGHTS_MISSING
    tiny.llm.engine.add_request("queued", TINY_PROMPTS[0], tiny.params)
    tiny.llm.reload_weights()
    assert tiny.last_tokens() == tiny.expected


def test_a_repeated_sleep_ends_no_requests_and_a_deeper_one_does(make_tiny: Callable[..., Subject]) -> None:
    tiny = make_tiny(sleeping_requests="queue")
    for deeper in (False, True):
        tiny.start(steps=3)
        assert tiny.llm.sleep(mode="keep").kept == 3
        tiny.llm.engine.add_request("queued", TINY_PROMPTS[0], tiny.params)
        again = tiny.llm.sleep(mode="abort")
        assert (again.changed, again.kept, again.aborted) == (False, 4, 0)
        if deeper:
            assert tiny.llm.sleep(level=2, mode="abort").aborted == 4
        tiny.llm.wake_up()
        if not deeper:
            assert tiny.last_tokens() == tiny.expected


# Prefix cache


def test_the_prefix_cache_is_valid_after_a_preserving_sleep_and_empty_after_another(small: Subject) -> None:
    llm = small.llm
    llm.engine.reset_prefix_cache()
    (first,) = llm.generate(LONG, small.params)
    assert first.num_cached_tokens == 0
    llm.sleep(kv="preserve")
    llm.wake_up()
    (hit,) = llm.generate(LONG, small.params)
    assert hit.num_cached_tokens >= 32
    llm.sleep(kv="discard")
    llm.wake_up()
    (computed,) = llm.generate(LONG, small.params)
    assert computed.num_cached_tokens == 0
    assert first.outputs[0].token_ids == hit.outputs[0].token_ids == computed.outputs[0].token_ids


# Weights


def test_new_weights_arrive_between_two_partial_wakes_and_survive_later_sleeps(
    small: Subject, small_checkpoint: dict[str, torch.Tensor]
) -> None:
    llm = small.llm
    llm.sleep(tier="disk")
    llm.wake_up()
    llm.sleep(level=2)
    assert llm.wake_up(tags=["weights"]).asleep == {"kv_cache"}
    small.tokens_changed = True
    assert llm.update_weights(_of_another_model(small_checkpoint)) == len(small_checkpoint)
    assert llm.wake_up(tags=["kv_cache"]).state is EngineState.RUNNING
    changed = small.tokens()
    assert changed != small.expected
    seen: list[tuple[int, int]] = []
    for progress in (lambda done, total: seen.append((done, total)), None):
        llm.sleep(tier="disk", progress=progress)
        llm.wake_up()
        assert small.tokens() == changed
    assert seen == sorted(seen)
    assert all(0 < done <= total for done, total in seen)
    assert seen[-1][1] >= llm.info.weight_bytes


def test_updated_weights_are_not_in_the_source_until_they_are_reloaded(
    tiny: Subject, checkpoint: dict[str, torch.Tensor]
) -> None:
    tiny.tokens_changed = True
    tiny.llm.update_weights(_of_another_model(checkpoint))
    with pytest.raises(CapabilityRefused, match="updated since they were loaded"):
        tiny.llm.sleep(tier="source")
    tiny.llm.reload_weights()
    tiny.llm.sleep(tier="source")
    tiny.llm.wake_up()
    assert tiny.tokens() == tiny.expected


def test_an_update_voids_what_was_computed_with_the_old_weights(
    tiny: Subject, checkpoint: dict[str, torch.Tensor]
) -> None:
    llm, prompt, other = tiny.llm, TINY_PROMPTS[2], [(NORM, checkpoint[NORM].flip(0))]
    tiny.tokens_changed = True
    llm.update_weights(other)
    llm.engine.reset_prefix_cache()
    expected = llm.generate(prompt, tiny.params)[0].outputs[0].token_ids
    llm.reload_weights()
    llm.generate(prompt, tiny.params)
    assert llm.generate(prompt, tiny.params)[0].num_cached_tokens > 0
    llm.engine.add_request("in progress", prompt, tiny.params)
    llm.engine.step()
    llm.update_weights(other)
    output = drain(llm.engine)["in progress"][-1]
    # The first token was drawn with the old weights; what follows is computed with the new ones alone.
    (again,) = llm.generate(
        {"prompt_token_ids": [*output.prompt_token_ids, output.outputs[0].token_ids[0]]}, tiny.params
    )
    assert output.outputs[0].token_ids[1:] == again.outputs[0].token_ids[:-1]
    assert llm.generate(prompt, tiny.params)[0].outputs[0].token_ids == expected


def test_updates_in_buckets_cover_all_weights_in_the_end(tiny: Subject, checkpoint: dict[str, torch.Tensor]) -> None:
    tiny.llm.sleep(level=2)
    tiny.llm.wake_up()
    names = sorted(checkpoint)
    for bucket in (names[::2], names[1::2]):
        with pytest.raises(WeightsMissing):
            tiny.tokens()
        tiny.llm.update_weights((name, checkpoint[name]) for name in bucket)
    assert tiny.tokens() == tiny.expected


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_are_being_written_are_neither_served_nor_put_to_sleep(
    level: int, tiny: Subject, checkpoint: dict[str, torch.Tensor]
) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(_of_another_model(checkpoint)):
            if number == len(checkpoint) // 2:
                with pytest.raises(MemoryBusy):
                    tiny.llm.sleep(level=level)
                with pytest.raises(MemoryBusy):
                    tiny.tokens()
                assert tiny.llm.sleep_status().memory["weights"].mapped
            yield pair

    tiny.tokens_changed = True
    assert tiny.llm.update_weights(weights()) == len(checkpoint)
    changed = tiny.tokens()
    assert changed != tiny.expected
    tiny.llm.sleep()
    tiny.llm.wake_up()
    assert tiny.tokens() == changed


def test_an_update_that_breaks_off_is_never_served(tiny: Subject, checkpoint: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CorruptWeights):
        tiny.llm.update_weights([("nonsense", checkpoint[NORM])])
    assert tiny.tokens() == tiny.expected
    with pytest.raises(CorruptWeights):
        tiny.llm.update_weights([(NORM, checkpoint[NORM].flip(0)), ("nonsense", checkpoint[NORM])])
    assert tiny.llm.sleep_status().state is EngineState.WEIGHTS_MISSING
    with pytest.raises(WeightsMissing):
        tiny.tokens()
    with pytest.raises(ModelNotFound):
        tiny.llm.reload_weights("nowhere")
    tiny.llm.reload_weights()
    assert tiny.tokens() == tiny.expected


def test_a_reload_finds_the_checkpoint_that_is_there_now(
    make_tiny: Callable[..., Subject], checkpoint: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tiny = make_tiny()
    save_file(dict(_of_another_model(checkpoint)), tmp_path / "new.safetensors", metadata={"format": "pt"})
    (tmp_path / "new.safetensors").replace(tmp_path / "model" / "model.safetensors")
    tiny.llm.reload_weights()
    changed = tiny.tokens()
    assert changed != tiny.expected
    tiny.llm.sleep(tier="source")
    tiny.llm.wake_up()
    assert tiny.tokens() == changed


def test_weights_that_were_written_unseen_are_declared_valid(
    tiny: Subject, checkpoint: dict[str, torch.Tensor]
) -> None:
    tiny.tokens_changed = True
    tiny.llm.sleep(tier="disk")
    tiny.llm.wake_up()
    program = tiny.llm.engine._loop.core.executor._worker._loaded.model.model._program
    program.load_weight("model.norm.weight", checkpoint[NORM].flip(0))
    tiny.llm.declare_weights_valid()
    changed = tiny.tokens()
    assert changed != tiny.expected
    tiny.llm.sleep(tier="disk")
    tiny.llm.wake_up()
    assert tiny.tokens() == changed


def test_a_write_that_nobody_announced_is_found_where_backups_are_verified(
    tiny: Subject, checkpoint: dict[str, torch.Tensor]
) -> None:
    tiny.tokens_changed = True
    tiny.llm.sleep(tier="disk")
    tiny.llm.wake_up()
    program = tiny.llm.engine._loop.core.executor._worker._loaded.model.model._program
    program.load_weight("model.norm.weight", checkpoint[NORM].flip(0))
    changed = tiny.tokens()
    with pytest.raises(BackupStale):
        tiny.llm.sleep(tier="disk", verify=True)
    assert not tiny.llm.is_sleeping()
    tiny.llm.declare_weights_valid()
    tiny.llm.sleep(tier="disk", verify=True)
    tiny.llm.wake_up()
    assert tiny.tokens() == changed


# Failing drivers


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[DriverTable]:
    """The driver tables of the engines that are made from here on."""
    opened: list[DriverTable] = []

    def open_and_note(device: int) -> DriverTable:
        opened.append(driver_table(device))
        return opened[-1]

    monkeypatch.setattr("hardpoint_cpu.allocator.driver_table", open_and_note)
    return opened


@pytest.mark.parametrize("entry", ["copy_to_host", "unmap", "stream_synchronize"])
def test_a_driver_call_that_fails_in_a_sleep_leaves_requests_and_prefix_cache_as_they_were(
    entry: str, tables: list[DriverTable], make_tiny: Callable[..., Subject]
) -> None:
    tiny = make_tiny()
    tiny.start(steps=3)
    cached = tiny.llm.stats().blocks_cached
    DriverFaults(tables[0]).fail(entry)
    with pytest.raises(DriverError):
        tiny.llm.sleep(tier="host", mode="abort")
    assert tiny.llm.sleep_status().state is EngineState.RUNNING
    assert tiny.llm.stats().blocks_cached == cached > 0
    tiny.llm.sleep(tier="host", mode="keep")
    tiny.llm.wake_up()
    assert tiny.last_tokens() == tiny.expected


@pytest.mark.parametrize("entry", ["create", "map", "copy_to_device", "stream_synchronize"])
def test_a_driver_call_that_fails_in_a_wake_leaves_the_engine_asleep_and_a_retry_works(
    entry: str, tables: list[DriverTable], make_tiny: Callable[..., Subject]
) -> None:
    tiny = make_tiny()
    tiny.start(steps=3)
    tiny.llm.sleep(tier="host", mode="keep", kv="preserve")
    DriverFaults(tables[0]).fail(entry)
    with pytest.raises((DriverError, DeviceOutOfMemory)):
        tiny.llm.wake_up()
    assert tiny.llm.sleep_status().asleep == {"weights", "buffers", "kv_cache", "default"}
    with pytest.raises(EngineAsleep):
        tiny.llm.engine.step()
    tiny.llm.wake_up()
    assert tiny.last_tokens() == tiny.expected


# Other ways of running


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_in_safetensors_sleeps_on_every_tier(fused: bool, make_tiny: Callable[..., Subject]) -> None:
    tiny = make_tiny(use_fused_decoder=fused)
    assert tiny.llm.info.path == ("fused" if fused else "modules")
    for arguments in ({"tier": "source"}, {"tier": "disk"}, {"level": 2}):
        report = tiny.llm.sleep(**arguments)
        if arguments.get("tier") == "source":
            assert report.memory is not None
            assert report.memory.skipped >= tiny.llm.info.weight_bytes
        if not tiny.llm.wake_up().weights_valid:
            tiny.llm.reload_weights()
        assert tiny.tokens() == tiny.expected


def test_a_model_that_runs_through_transformers_sleeps_too(tmp_path: Path, greedy: Any) -> None:
    from transformers import GPT2Config

    shape = {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128}
    GPT2Config(**shape, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    with _tiny_engine(tmp_path / "gpt2", tmp_path, load_format="dummy") as llm:
        subject = Subject(llm, TINY_PROMPTS, greedy())
        assert llm.info.path == "transformers"
        for arguments in ({"tier": "source"}, {"tier": "disk"}, {"level": 2}):
            llm.sleep(**arguments)
            if not llm.wake_up().weights_valid:
                llm.reload_weights()
            assert subject.tokens() == subject.expected


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_that_changed_while_the_engine_slept_is_not_served_as_the_old_one(
    fused: bool, make_tiny: Callable[..., Subject], checkpoint: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tiny = make_tiny(use_fused_decoder=fused)
    llm = tiny.llm
    llm.sleep(tier="source")
    changed = save(dict(_of_another_model(checkpoint)), metadata={"format": "pt"})
    (tmp_path / "model" / "model.safetensors").write_bytes(changed)
    with pytest.raises(BackupCorrupt):
        llm.wake_up()
    assert "weights" in llm.sleep_status().asleep
    llm.sleep(level=2)
    llm.wake_up()
    llm.reload_weights()
    assert tiny.tokens() != tiny.expected


# Several engines, participants, ends


def test_engines_sleep_independently(tiny: Subject, make_tiny: Callable[..., Subject]) -> None:
    other = make_tiny(use_fused_decoder=False)
    tiny.llm.sleep(level=1)
    assert not other.llm.is_sleeping()
    assert other.tokens() == other.expected
    other.llm.sleep(level=2)
    tiny.llm.wake_up()
    assert tiny.tokens() == tiny.expected
    assert other.llm.is_sleeping()
    other.llm.wake_up()
    other.llm.reload_weights()
    assert other.tokens() == other.expected


class KVScales:
    """A participant that fails on request."""

    name = "kv scales"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False

    def before_sleep(self, plan: Any) -> None:
        if self.fails:
            raise OSError("busy")
        self.told.append(sorted(plan.tags))

    def after_wake(self, tags: frozenset[str]) -> None:
        self.told.append(sorted(tags))

    def resident_bytes(self) -> int:
        return 123


def test_a_participant_is_told_and_its_failure_leaves_the_engine_running(make_tiny: Callable[..., Subject]) -> None:
    tiny, scales = make_tiny(), KVScales()
    tiny.llm.register_participant(scales)
    scales.fails = True
    with pytest.raises(ParticipantError, match="kv scales"):
        tiny.llm.sleep()
    assert tiny.tokens() == tiny.expected
    scales.fails = False
    assert tiny.llm.sleep(tags="kv_cache").residual["kv scales"] == 123
    tiny.llm.wake_up()
    assert scales.told == [["kv_cache"], ["kv_cache"]]


def test_an_engine_ends_while_it_sleeps(make_tiny: Callable[..., Subject], tmp_path: Path) -> None:
    llm = make_tiny().llm
    llm.sleep(tier="disk")
    llm.shutdown()
    with pytest.raises(EngineDead):
        llm.wake_up()
    llm.shutdown()
    gc.collect()
    left = [path for path in (tmp_path / "backups").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) == 0


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("settings", [{}, {"engine_process": True}], ids=["here", "process"])
def test_a_refused_sleep_leaves_nothing_of_an_engine_that_has_ended(
    make_tiny: Callable[..., Subject], tmp_path: Path, mode: str, settings: dict[str, bool]
) -> None:
    """No memory, and no backups: the process of an engine ends without a collection."""
    tiny = make_tiny(**settings)
    llm = tiny.llm
    llm.sleep(tier="disk")
    llm.wake_up()
    llm.declare_weights_valid()
    tiny.start()
    gc.disable()
    try:
        with pytest.raises(CapabilityRefused, match="left to their source"):
            llm.sleep(mode=mode, tier="source")
        llm.shutdown()
        assert [path for path in (tmp_path / "backups").rglob("*") if path.is_file()] == []
    finally:
        gc.enable()


def test_impossible_sleeps_change_nothing(tiny: Subject) -> None:
    for arguments, error in (
        ({"level": 3}, SleepRefused),
        ({"levle": 1}, SleepRefused),
        ({"mode": "later"}, SleepRefused),
        ({"tier": "tape"}, SleepRefused),
        ({"tags": ["wights"]}, UnknownTag),
    ):
        with pytest.raises(error):
            tiny.llm.sleep(**arguments)
    with pytest.raises(UnknownTag):
        tiny.llm.wake_up(tags=["wights"])
    assert tiny.tokens() == tiny.expected


@pytest.mark.parametrize(
    "settings",
    [
        {"sleep_tier": "tape"},
        {"sleep_host_budget": -1.0},
        {"sleeping_requests": "drop"},
        {"max_queued_while_asleep": 0},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LLM("demo", backend="cpu", **settings)


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change what the CPU backend says of itself."""
    from hardpoint.engine import startup

    def change(**claims: Any) -> None:
        resolved = startup.resolve_backend("cpu")
        changed = replace(resolved, descriptor=replace(resolved.descriptor, **claims))
        monkeypatch.setattr(startup, "resolve_backend", lambda *arguments, **options: changed)

    return change


def test_sleep_mode_is_refused_where_the_backend_claims_no_sleep(
    as_if: Callable[..., None], make_tiny: Callable[..., Subject]
) -> None:
    as_if(capabilities=lambda device: Capabilities.none())
    with pytest.raises(CapabilityRefused, match="no sleep level"):
        make_tiny(enable_sleep_mode=True)


def test_the_first_sleep_is_made_ready_where_it_takes_host_memory_beside_an_accelerator_or_the_disk(
    as_if: Callable[..., None], make_tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardpoint_cpu.allocator import CpuAllocator

    plans: list[SleepPlan] = []
    monkeypatch.setattr(CpuAllocator, "prepare_sleep", lambda self, plan: plans.append(plan))
    make_tiny(enable_sleep_mode=True, sleep_tier="host")
    make_tiny(enable_sleep_mode=False)
    as_if(accelerator=True)
    make_tiny(enable_sleep_mode=False)
    make_tiny(enable_sleep_mode=True, sleep_tier="source")
    assert plans == []
    make_tiny(enable_sleep_mode=True, sleep_tier="disk")
    make_tiny(enable_sleep_mode=True, sleep_host_budget=0.5)
    assert [(plan.tier, plan.host_budget, plan.keep) for plan in plans] == [
        (SleepTier.DISK, None, {"weights"}),
        (SleepTier.HOST, 1 << 29, {"weights"}),
    ]


def test_the_default_tier_is_the_one_that_frees_memory(
    as_if: Callable[..., None], make_tiny: Callable[..., Subject]
) -> None:
    assert make_tiny().llm.sleep().tier is SleepTier.DISK
    as_if(accelerator=True)
    assert make_tiny().llm.sleep().tier is SleepTier.HOST
    assert make_tiny(sleep_tier="source").llm.sleep().tier is SleepTier.SOURCE


def test_sleeps_and_wakes_are_counted(make_tiny: Callable[..., Subject]) -> None:
    llm = make_tiny(enable_sleep_mode=True).llm
    report = llm.sleep(tier="disk")
    totals = llm.stats().sleep
    assert (totals.sleeps, totals.wakes, totals.failures) == (1, 0, 0)
    assert totals.freed_bytes == report.freed >= totals.preserved_bytes >= llm.info.weight_bytes
    llm.wake_up()
    assert llm.stats().sleep.restored_bytes >= llm.info.weight_bytes
