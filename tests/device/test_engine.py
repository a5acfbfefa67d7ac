"""A whole engine on a device: graphs change nothing, and what was captured before a sleep is right after the wake.

On a device these run with the graphs that its backend captures. Without one they run on the CPU, which has none: there they show that the
tests work. Over simulated drivers nothing computes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.device_shapes import TINY
from hardpoint.interfaces import AttentionCapabilities, DType, GraphLevel, Platform

from .targets import DEVICE, SIMULATION_EXPECTED, filled_by_another_process

if TYPE_CHECKING:
    from hardpoint import LLM

BACKEND, _, INDEX = (DEVICE or "cpu:0").partition(":")

pytestmark = pytest.mark.skipif(
    SIMULATION_EXPECTED or find_spec("torch") is None or find_spec("transformers") is None,
    reason="needs torch and transformers, and a device that computes",
)

MakeEngine = Callable[..., "LLM"]


@pytest.fixture
def claims() -> AttentionCapabilities:
    """What the backend claims of attention here."""
    from hardpoint.plugins import resolve_backend

    found = resolve_backend(BACKEND, device=int(INDEX))
    claimed: AttentionCapabilities = found.descriptor.capabilities(found.device).attention
    return claimed


@pytest.fixture
def captures(claims: AttentionCapabilities) -> bool:
    """Whether the backend captures graphs here."""
    return claims.graph_level is not GraphLevel.NONE


@pytest.fixture
def make(tmp_path: Path, claims: AttentionCapabilities) -> Iterator[MakeEngine]:
    """Make engines with the same random weights.

    In float32 where that is claimed: batches of other sizes round otherwise, and in bfloat16 that can choose another token.
    """
    (tmp_path / "config.json").write_text(json.dumps(TINY.config), "utf-8")
    from hardpoint import LLM

    with ExitStack() as engines:

        def engine(**settings: Any) -> LLM:
            common: dict[str, Any] = {
                "backend": BACKEND,
                "device": int(INDEX),
                "dtype": "float32" if DType.FLOAT32 in claims.dtypes else "auto",
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "max_num_seqs": 20,
                "num_device_blocks": 256,
                "swap_space": 0.0,
                "enable_prefix_caching": False,
            }
            return engines.enter_context(LLM(str(tmp_path), **common | settings))

        yield engine


def requests(count: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return prompts of different lengths, and sampling that ends at different times and depends on all logits of every step."""
    from hardpoint import SamplingParams

    source = random.Random(count)
    prompts = [{"prompt_token_ids": [source.randrange(TINY.vocab) for _ in range(5 + 3 * i)]} for i in range(count)]
    params = [
        SamplingParams(temperature=0.2, seed=i, max_tokens=8 + 5 * (i % 4), ignore_eos=True) for i in range(count)
    ]
    return prompts, params


def tokens(llm: LLM, count: int) -> list[list[int]]:
    """Return what an engine answers to `count` requests at once."""
    prompts, params = requests(count)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def test_graphs_give_the_tokens_of_eager_steps(make: MakeEngine, captures: bool) -> None:
    if not captures:
        pytest.skip(f"backend '{BACKEND}' captures no graphs")
    graphs, eager = make(), make(enforce_eager=True)
    for count in (1, 3, 20, 2):
        assert tokens(graphs, count) == tokens(eager, count)


@pytest.mark.parametrize("level", [1, 2])
def test_steps_give_the_same_tokens_after_sleep_and_wake(make: MakeEngine, captures: bool, level: int) -> None:
    llm = make()
    expected = [tokens(llm, count) for count in (1, 5)]
    for _ in range(2):
        report = llm.sleep(level)
        assert ("graphs" in report.tags) is captures
        llm.wake_up()
        if level == 2:
            llm.reload_weights()
        assert [tokens(llm, count) for count in (1, 5)] == expected


REPLAYS = 10_000 if DEVICE else 100


def test_replays_with_fresh_metadata_give_the_tokens_of_eager_steps(make: MakeEngine, captures: bool) -> None:
    if not captures:
        pytest.skip(f"backend '{BACKEND}' captures no graphs")
    graphs, eager = make(), make(enforce_eager=True)
    before = graphs.stats().steps
    for number in itertools.count():
        count = 1 + number % 20
        assert tokens(graphs, count) == tokens(eager, count), f"batch {number}"
        if graphs.stats().steps - before >= REPLAYS:
            break


def test_tokens_are_the_same_after_another_process_filled_what_a_sleep_freed(make: MakeEngine) -> None:
    llm = make()
    expected = [tokens(llm, count) for count in (1, 5, 20)]
    freed = llm.sleep(1).freed
    assert freed > 0
    with filled_by_another_process(BACKEND, int(INDEX), freed):
        llm.wake_up()
        assert [tokens(llm, count) for count in (1, 5, 20)] == expected


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_nothing_is_compiled_after_the_warm_up(make: MakeEngine, eager: bool) -> None:
    """Contexts that are attended in one part and in several, prompts among decodes, greedy and sampled."""
    if find_spec("triton") is None:
        pytest.skip("needs triton, which compiles at a kernel's first use")
    from triton import knobs

    from hardpoint import SamplingParams

    llm = make(enforce_eager=eager)
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(str(facts["fn"].name))
    try:
        for count in (1, 2, 16, 20):
            tokens(llm, count)
        prompts = [{"prompt_token_ids": [7] * length} for length in (3, 300, 600)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_decode_waits_for_its_steps_and_for_nothing_else(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """Neither by the platform's call nor by torch's own (copies of pageable memory, `item`): there is an event for each step."""
    import torch

    from hardpoint.plugins import resolve_backend
    from hardpoint.worker import TorchPlatform

    llm = make(enforce_eager=eager)
    device = torch.device(resolve_backend(BACKEND, device=int(INDEX)).device.torch_device)
    for count in (1, 5, 20):
        tokens(llm, count)
    prompts, params = requests(20)
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(number), prompt, param.clone(max_tokens=40))
    prefilled = llm.stats().prefill_tokens + sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    while llm.stats().prefill_tokens < prefilled:
        llm.engine.step()
    waits: list[str] = []
    for platform in (Platform, TorchPlatform):
        monkeypatch.setattr(platform, "synchronize", lambda self: waits.append("synchronize"))
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            llm.engine.step()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)
    assert llm.engine.has_unfinished_requests(), "all of these steps decoded"
    assert waits == []
    llm.engine.abort_request([str(number) for number in range(20)])


def test_graphs_alone_can_sleep(make: MakeEngine, captures: bool) -> None:
    if not captures:
        pytest.skip(f"backend '{BACKEND}' captures no graphs")
    llm = make()
    expected = tokens(llm, 5)
    assert llm.sleep(1, tags="graphs").freed > 0
    llm.wake_up()
    assert tokens(llm, 5) == expected


@pytest.mark.parametrize("kv", ["discard", "preserve"])
def test_requests_go_on_after_a_sleep_in_their_middle(make: MakeEngine, kv: str) -> None:
    llm = make()
    expected = tokens(llm, 5)
    prompts, params = requests(5)
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(number), prompt, param)
    found: dict[int, list[int]] = {}

    def step() -> None:
        for output in llm.engine.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)  # type: ignore[union-attr]

    for _ in range(4):
        step()
    assert llm.sleep(1, mode="keep", kv=kv).kept == 5
    llm.wake_up()
    while llm.engine.has_unfinished_requests():
        step()
    assert [found[number] for number in range(5)] == expected
