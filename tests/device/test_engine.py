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
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.device_shapes import TINY
from hardpoint.interfaces import AttentionCapabilities, DType, GraphLevel, Platform

from .targets import DEVICE, SIMULATION_EXPECTED, filled_by_another_process
from .vendor_tools import NoTool, Use, check_freed

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


def tokens_of_arrivals(llm: LLM, count: int) -> list[list[int]]:
    """Return what an engine answers to `count` requests that arrive one after the other, while those before are decoded."""
    prompts, params = requests(count)
    found: dict[int, list[int]] = {}
    for number in itertools.count():
        if number % 2 == 0 and number // 2 < count:
            llm.engine.add_request(str(number // 2), prompts[number // 2], params[number // 2])
        for output in llm.engine.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)  # type: ignore[union-attr]
        if number // 2 >= count and not llm.engine.has_unfinished_requests():
            break
    return [found[number] for number in range(count)]


def test_graphs_give_the_tokens_of_eager_steps(make: MakeEngine, captures: bool) -> None:
    if not captures:
        pytest.skip(f"backend '{BACKEND}' captures no graphs")
    graphs, eager = make(), make(enforce_eager=True)
    for count in (1, 3, 20, 2):
        assert tokens(graphs, count) == tokens(eager, count)


@pytest.mark.parametrize("budget", [None, 24], ids=["whole", "chunks"])
def test_graphs_give_the_tokens_of_eager_steps_to_requests_that_arrive_while_others_decode(
    make: MakeEngine, claims: AttentionCapabilities, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    """Prompts in one piece and in chunks; where steps with prompts are captured, these are replayed."""
    if claims.graph_level is GraphLevel.NONE:
        pytest.skip(f"backend '{BACKEND}' captures no graphs")
    from hardpoint.worker import TorchGraphRunner

    budgets = {} if budget is None else {"max_num_batched_tokens": budget}
    graphs, eager = make(**budgets), make(enforce_eager=True, **budgets)
    replay, keys = TorchGraphRunner.replay, set()

    def note(self: TorchGraphRunner, key: int) -> None:
        keys.add(key)
        replay(self, key)

    monkeypatch.setattr(TorchGraphRunner, "replay", note)
    for count in (1, 3, 20, 2):
        assert tokens_of_arrivals(graphs, count) == tokens_of_arrivals(eager, count)
    assert max(keys) > 0
    assert (min(keys) < 0) is (claims.graph_level >= GraphLevel.MIXED)


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
        serve = tokens_of_arrivals if number % 2 else tokens
        assert serve(graphs, count) == serve(eager, count), f"batch {number}"
        if graphs.stats().steps - before >= REPLAYS:
            break


def need_devices(count: int) -> None:
    """Skip where an engine of so many ranks has no device for each. Ranks on the host share it."""
    from hardpoint.plugins import resolve_backend

    found = resolve_backend(BACKEND, device=int(INDEX))
    left = len(found.descriptor.probe().devices) - int(INDEX)
    if count > 1 and count not in found.descriptor.capabilities(found.device).tensor_parallel:
        pytest.skip(f"backend '{BACKEND}' does not run {count} ranks here")
    if BACKEND != "cpu" and left < count:
        pytest.skip(f"{count} ranks need {count} devices, and there are {left}")


def in_use() -> Use:
    return Use.now(BACKEND)


LARGE: dict[str, Any] = {"num_device_blocks": 8192, "block_size": 128} if DEVICE else {}
"""A KV cache of a GiB or two, which a vendor's tool tells from what else changes."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_the_same_after_another_process_filled_what_a_sleep_freed(
    make: MakeEngine, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    """And the vendor's own tool says that a sleep freed what its report says; where there is none, the report of the test says so."""
    need_devices(ranks)
    llm = make(tensor_parallel_size=ranks, **LARGE)
    expected = [tokens(llm, count) for count in (1, 5, 20)]
    before = reason = None
    try:
        before = in_use()
    except NoTool as missing:
        reason = str(missing)
    freed = llm.sleep(1).freed
    assert freed > 0
    record_property("vendor_tool", reason if before is None else f"{check_freed(before, freed, in_use, ranks)} bytes")
    with ExitStack() as others:
        for rank in range(ranks):
            others.enter_context(filled_by_another_process(BACKEND, int(INDEX) + rank, freed // ranks))
        llm.wake_up()
        assert [tokens(llm, count) for count in (1, 5, 20)] == expected


def checksums(llm: LLM) -> dict[str, str]:
    """Return one of every weight and buffer of an engine in this process, as the device has them."""
    import torch

    model = llm.engine._loop.core.executor._worker._loaded.model.model
    weights = {name: model._present(name) for name in model._weights.stored}
    buffers = {name: buffer for name, buffer in model._model.named_buffers() if not buffer.is_meta}
    return {
        name: sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in (weights | buffers).items()
    }


def write_weights(folder: Path) -> None:
    """Write a checkpoint with random weights beside a configuration."""
    import torch
    from safetensors.torch import save_file

    from hardpoint.models import open_model

    source: Any = open_model(str(folder), load_format="dummy")
    generator = torch.Generator().manual_seed(0)
    shapes = source.describe(source.dtype).checkpoint_shapes
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("tier", ["host", "disk", "source"])
def test_every_weight_has_its_bytes_after_the_wake(make: MakeEngine, tmp_path: Path, tier: str) -> None:
    """After a sleep that copies them, one that keeps the copies, and in the end one that discards them, from their checkpoint."""
    write_weights(tmp_path)
    llm = make(load_format="auto", sleep_disk_directory=str(tmp_path))
    expected = checksums(llm)
    assert len(set(expected.values())) > 10, "random weights"
    for _ in range(2):
        freed = llm.sleep(1, tier=tier).freed
        with filled_by_another_process(BACKEND, int(INDEX), freed):
            llm.wake_up()
            assert checksums(llm) == expected
    llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    assert checksums(llm) == expected


def test_communicators_sleep_where_the_library_can(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for: their memory comes back, captured steps are right after each wake, and the engine can end asleep."""
    if BACKEND != "cuda":
        pytest.skip(f"backend '{BACKEND}' does not suspend communicators")
    need_devices(2)
    from hardpoint_cuda.collectives import MIN_SUSPEND_VERSION, SUSPEND_VARIABLE, nccl_version

    if nccl_version() < MIN_SUSPEND_VERSION:
        pytest.skip(f"NCCL {nccl_version()} is older than {MIN_SUSPEND_VERSION}")
    monkeypatch.setenv(SUSPEND_VARIABLE, "1")
    llm = make(tensor_parallel_size=2)
    expected = [tokens(llm, count) for count in (1, 5, 20)]
    for _ in range(3):
        kept, awake = llm.sleep(1).residual.get("collectives", 0), llm.wake_up().memory
        assert awake is not None
        assert kept < awake.residual["collectives"]
        assert [tokens(llm, count) for count in (1, 5, 20)] == expected
    llm.sleep(1)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_nothing_is_compiled_after_the_warm_up(make: MakeEngine, eager: bool) -> None:
    """Contexts that are attended in one part and in several, prompts among decodes, greedy and sampled."""
    if find_spec("triton") is None:
        pytest.skip("triton, which compiles a kernel at its first use, is not installed")
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
