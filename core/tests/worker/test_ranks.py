"""Workers that are ranks of one model: what is refused, and that steps give what one worker gives."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import Capabilities, IntSet, Platform, Pooling, SequencePooling, SequenceSampling
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, OutputFailed
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.models import ParallelRank
from hardpoint.plugins import resolve_backend
from hardpoint.sampling.sampler import Sampler
from hardpoint.worker import StandardWorker
from hardpoint.worker.dummy_batches import dummy_batch
from hardpoint.worker.model_runner import PlainRows
from hardpoint.worker.pooler import Pooler
from hardpoint.worker.ranks import (
    RendezvousPoint,
    TorchCollectives,
    check_ranks,
    join_ranks,
    parallel_rank_of,
    require_env,
)

ADDRESS = "tcp://127.0.0.1:9/nobody"


class PlainWorker(StandardWorker):
    """The core's worker, unchanged."""


def refuse(descriptor_changes: dict[str, Any] | None = None, **changes: Any) -> None:
    resolved = resolve_backend("cpu")
    descriptor = replace(resolved.descriptor, **(descriptor_changes or {}))
    check_ranks(WorkerConfig("demo", **changes), descriptor, resolved.device)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"world_size": 2}, "tensor_parallel_size=1, pipeline_parallel_size=1"),
        ({"world_size": 2, "tensor_parallel_size": 2, "rank": 2}, "rank 2 of 2"),
        ({"world_size": 2, "tensor_parallel_size": 2, "rank": -1}, "rank -1 of 2"),
        ({"world_size": 0, "tensor_parallel_size": 0}, "rank 0 of 0"),
        ({"world_size": 2, "tensor_parallel_size": 2}, "empty init_method"),
        ({"world_size": 2, "pipeline_parallel_size": 2, "init_method": "udp://x:1"}, "udp://x:1"),
    ],
)
def test_contradictions_between_sizes_rank_and_address_are_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        refuse(**changes)


def test_what_the_backend_does_not_claim_is_refused_with_all_reasons() -> None:
    claims = Capabilities.none()
    poor = {"capabilities": lambda device: replace(claims, tensor_parallel=IntSet.of(1)), "collectives": None}
    with pytest.raises(CapabilityRefused) as caught:
        refuse(poor, world_size=3, tensor_parallel_size=3, init_method=ADDRESS)
    assert len(caught.value.reasons) == 2
    assert "(supported: 1)" in caught.value.reasons[0]
    with pytest.raises(CapabilityRefused, match="collectives"):
        refuse(poor, world_size=2, pipeline_parallel_size=2, init_method=ADDRESS)


def test_a_configuration_says_where_its_rank_is() -> None:
    config = WorkerConfig("demo", rank=4, world_size=6, tensor_parallel_size=3, pipeline_parallel_size=2)
    assert parallel_rank_of(config) == ParallelRank(1, 3, 1, 2)
    assert config.driver_rank == 3


@pytest.mark.parametrize(
    ("text", "rendezvous"),
    [
        ("tcp://10.0.0.1:29500", RendezvousPoint("10.0.0.1", 29500)),
        ("tcp://node:1/engine/7", RendezvousPoint("node", 1, "engine/7")),
        ("tcp://[::1]:5/x?served", RendezvousPoint("::1", 5, "x", True)),
        ("file:///proc/self/fd/7#x", RendezvousPoint("127.0.0.1", 0, "x", True, "/proc/self/fd/7")),
    ],
)
def test_a_rendezvous_point_is_read(text: str, rendezvous: RendezvousPoint) -> None:
    assert RendezvousPoint.parse(text) == rendezvous
    inner = RendezvousPoint.parse(rendezvous.subgroup("stage0", served=False))
    assert inner == replace(rendezvous, group=f"{rendezvous.group}/stage0".lstrip("/"))
    assert RendezvousPoint.parse(rendezvous.subgroup("stage0", served=True)).served


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://host", "tcp://:5", "tcp://host:x", "tcp://h:1?no", "file://h/x", "file:x", "file:///x?y"],
)
def test_an_invalid_rendezvous_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port/group"):
        RendezvousPoint.parse(text)


def test_rows_are_plain_once_their_min_tokens_are_out() -> None:
    plain, rows = PlainRows(), np.array([1, 200], np.int32)
    greedy = {"seed": 0, "temperature": 0.0}
    plain.write(
        [
            SequenceSampling(1, (3,), state_row=1, **greedy),
            SequenceSampling(2, (3,), state_row=200, min_tokens=2, stop_token_ids=frozenset({7}), **greedy),
        ]
    )
    assert plain.all(rows[:1], np.array([0]))
    assert not plain.all(rows, np.array([0, 1]))
    assert plain.all(rows, np.array([0, 2]))
    for other in (
        {"seed": 0},
        {**greedy, "logprobs": 0},
        {**greedy, "presence_penalty": 1.0},
        {**greedy, "logit_bias": {1: 1.0}},
    ):
        plain.write([SequenceSampling(3, (3,), state_row=1, **other)])
        assert not plain.all(rows[:1], np.array([9]))
    plain.write([SequenceSampling(4, (3,), state_row=1, **greedy)])
    assert plain.all(rows[:1], np.array([0])), "the row is another sequence's"


# Steps


def step(lengths: Sequence[int], token: int, **more: Any) -> StepInput:
    """Return a prefill of prompts of one token, repeated."""
    longest = max(lengths)
    batch = dummy_batch(num_tokens=longest * len(lengths), max_len=longest, block_size=8, max_seqs=len(lengths))
    tokens = np.full(batch.num_tokens, token) + np.arange(batch.num_tokens) % 7
    return StepInput(replace(batch, token_ids=tokens.astype(np.int64)), **more)


def run_step(worker: StandardWorker, given: StepInput) -> StepOutput:
    worker.submit(given)
    return worker.collect()


def outcome(worker: StandardWorker, given: StepInput) -> Any:
    try:
        return run_step(worker, given)
    except OutputFailed as error:
        return error


def serve(model: str, tensor: int, stages: int, steps: Callable[[], Sequence[StepInput]]) -> list[list[Any]]:
    """Run steps on the ranks of a model, each in a thread; return what each rank gave, failed outputs among it."""
    resolved = resolve_backend("cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}/engine"

    def rank(number: int) -> list[Any]:
        config = WorkerConfig(
            model,
            load_format="dummy",
            block_size=8,
            max_model_len=32,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            swap_space=0,
            threads=1,
            use_fused_decoder=False,
            rank=number,
            world_size=tensor * stages,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            init_method=address,
            communication_timeout=60.0,
        )
        worker = PlainWorker(WorkerContext(resolved.descriptor, resolved.device, config))
        try:
            worker.start()
            info = worker.load()
            assert info.num_layers == 4
            assert info.attention.kv_cache.num_layers == 4 // stages
            assert worker.profile().kv_bytes > 0
            worker.initialize_kv(16, 0)
            worker.warm_up()
            return [outcome(worker, one) for one in steps()]
        finally:
            worker.shutdown()

    with ThreadPoolExecutor(tensor * stages) as threads:
        return list(threads.map(rank, range(tensor * stages)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoConfig

    folder: Path = tmp_path_factory.mktemp("model")
    AutoConfig.for_model(
        "llama",
        vocab_size=99,
        hidden_size=80,
        intermediate_size=72,
        num_hidden_layers=4,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=8,
        max_position_embeddings=32,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def all_kinds() -> list[StepInput]:
    """Return steps that need the best token only, logits, hidden states, and hidden states with logits."""
    greedy = {"seed": 3, "temperature": 0.0}
    return [
        step([9], 5, new_sequences=(SequenceSampling(0, (5,), state_row=0, **greedy),)),
        step(
            [6, 6],
            11,
            finished_seq_ids=(0,),
            new_sequences=(
                SequenceSampling(0, (5,), seed=3, temperature=0.8, top_k=20, logprobs=3, state_row=0),
                SequenceSampling(1, (5,), min_tokens=1, stop_token_ids=frozenset({4}), state_row=1, **greedy),
            ),
        ),
        # Of the second sequence enough tokens were given by now.
        at_positions(step([6, 6], 17, new_sequences=(SequenceSampling(0, (5,), state_row=0, **greedy),)), [0, 1]),
        replace_samples(step([7], 21, pooling={0: SequencePooling(Pooling.MEAN, 7)}), []),
        step([8, 8], 31, pooling={1: SequencePooling(Pooling.LAST, 8)}),
    ]


def replace_samples(given: StepInput, rows: list[int]) -> StepInput:
    chosen = np.asarray(rows, np.int32)
    samples = {"sample_seq_ids": chosen.astype(np.int64), "sample_state_rows": chosen, "sample_positions": 0 * chosen}
    return replace(given, batch=replace(given.batch, sample_rows=chosen, **samples))


def at_positions(given: StepInput, positions: list[int]) -> StepInput:
    return replace(given, batch=replace(given.batch, sample_positions=np.asarray(positions, np.int32)))


def test_ranks_give_the_outputs_of_one_worker(model: str) -> None:
    (expected,) = serve(model, 1, 1, all_kinds)
    for tensor, stages in ((2, 1), (1, 2), (2, 2)):
        found = serve(model, tensor, stages, all_kinds)
        driver = tensor * (stages - 1)
        for one, other in zip(found[driver], expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.keys() == other.logprobs.keys()
            for index, logprobs in one.logprobs.items():
                assert logprobs.token_ids.tolist() == other.logprobs[index].token_ids.tolist()
                np.testing.assert_allclose(logprobs.logprobs, other.logprobs[index].logprobs, atol=1e-4)
            assert one.embeddings.keys() == other.embeddings.keys()
            for index, embedding in one.embeddings.items():
                np.testing.assert_allclose(embedding, other.embeddings[index], atol=1e-4)
        for rank, outputs in enumerate(found):
            if rank != driver:
                assert all(len(one.token_ids) == len(one.logprobs) == len(one.embeddings) == 0 for one in outputs)


class NotedGroup:
    """A process group that notes of each operation whether it runs on a stream of its own."""

    def __init__(self) -> None:
        self.noted: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self.noted[name] = any(getattr(argument, "asyncOp", False) for argument in arguments)
            return SimpleNamespace(wait=lambda: None)

        return operation


def test_rank_that_plans_for_longer_than_an_operation_may_take_is_waited_for() -> None:
    resolved = resolve_backend("cpu")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}/late"

    def join(rank: int, late: float) -> None:
        time.sleep(late)
        config = WorkerConfig(
            "demo", rank=rank, world_size=2, tensor_parallel_size=2, init_method=address, communication_timeout=1.0
        )
        joined, leave = join_ranks(config, resolved.descriptor, resolved.device)
        assert joined.tensor is not None
        leave.close()

    for late in (0.0, 2.5), (2.5, 0.0):
        with ThreadPoolExecutor(2) as ranks:
            for done in [ranks.submit(join, rank, seconds) for rank, seconds in enumerate(late)]:
                done.result(240)


def test_collectives_run_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    group = NotedGroup()
    monkeypatch.setattr(TorchCollectives, "_make_group", lambda *arguments: group)
    collectives = TorchCollectives(resolve_backend("cpu").device)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    collectives.start(0, 1, f"tcp://127.0.0.1:{port}/alone", 5.0)
    tensor = torch.zeros(2)
    collectives.all_reduce(tensor)
    collectives.all_gather(tensor, 0)
    collectives.broadcast(tensor, 0)
    collectives.stop()
    assert group.noted == dict.fromkeys(["allreduce", "_allgather_base", "broadcast", "shutdown"], False)


def test_a_variable_that_a_library_must_find_is_set_or_its_other_value_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LIBRARY_MODE", raising=False)
    for _ in range(2):
        require_env("LIBRARY_MODE", "0", because="it would")
        assert os.environ["LIBRARY_MODE"] == "0"
    monkeypatch.setenv("LIBRARY_MODE", "1")
    with pytest.raises(ConfigError, match=r"LIBRARY_MODE=1.*it would.*Unset LIBRARY_MODE"):
        require_env("LIBRARY_MODE", "0", because="it would")


NO_TOKEN_LEFT = {"temperature": 0.7, "allowed_token_ids": (4,), "min_tokens": 1, "stop_token_ids": frozenset({4})}
"""Sampling whose masks leave no token at the first one, which the driver finds when it draws."""


@contextmanager
def started(model: str, platform: type[Platform] = Platform) -> Iterator[StandardWorker]:
    resolved = resolve_backend("cpu")
    descriptor = replace(resolved.descriptor, platform=lambda: platform)
    config = WorkerConfig(
        model, load_format="dummy", block_size=8, max_model_len=32, max_num_batched_tokens=64, use_fused_decoder=False
    )
    one = StandardWorker(WorkerContext(descriptor, resolved.device, config))
    try:
        one.start()
        one.load()
        one.initialize_kv(16, 0)
        yield one
    finally:
        one.shutdown()


def test_a_sample_that_fails_leaves_the_other_sequences_as_they_were(model: str) -> None:
    drawn = SequenceSampling(1, (5,), seed=8, temperature=0.9, state_row=1)
    bad = SequenceSampling(0, (5,), seed=3, state_row=0, **NO_TOKEN_LEFT)
    first = replace_samples(step([6, 6], 11, new_sequences=(drawn,)), [1])
    both = at_positions(step([6, 6], 17, new_sequences=(bad,)), [0, 1])
    alone = at_positions(replace_samples(step([6, 6], 17), [1]), [1])
    last = at_positions(replace_samples(step([6, 6], 23), [1]), [2])
    with started(model) as worker:
        expected = [run_step(worker, one).token_ids.tolist() for one in (first, alone, last)]
    with started(model) as worker:
        assert run_step(worker, first).token_ids.tolist() == expected[0]
        output = run_step(worker, both)
        assert output.token_ids.tolist() == [-1, *expected[1]]
        assert list(output.failed) == [0]
        assert "masks leave no token" in output.failed[0]
        assert run_step(worker, last).token_ids.tolist() == expected[2]


def test_a_device_that_failed_is_no_failed_output(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Platform):
        works = True

        def synchronize(self) -> None:
            if not Failing.works:
                raise RuntimeError("an illegal address was accessed")

    def no_memory(*arguments: Any, **named: Any) -> Any:
        raise MemoryError("no room for the rows")

    with started(model, Failing) as worker:
        Failing.works = False
        monkeypatch.setattr(Sampler, "sample", no_memory)
        drawn = step([6], 11, new_sequences=(SequenceSampling(0, (5,), seed=3, state_row=0),))
        with pytest.raises(RuntimeError, match="illegal address") as caught:
            run_step(worker, drawn)
        assert not isinstance(caught.value, OutputFailed)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_ranks_stay_consistent_after_an_output_that_failed_on_the_driver(
    model: str, tensor: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sample without a token, and of a pooled output; the others know nothing of it, and the step after gives what it gives alone."""

    def no_memory(*arguments: Any, **named: Any) -> Any:
        raise MemoryError("no room for a sum")

    monkeypatch.setattr(Pooler, "add", no_memory)

    def steps() -> list[StepInput]:
        bad = SequenceSampling(0, (5,), seed=3, state_row=0, **NO_TOKEN_LEFT)
        return [
            step([6], 11, new_sequences=(bad,)),
            replace_samples(step([7], 21, pooling={0: SequencePooling(Pooling.MEAN, 7)}), []),
            step(
                [9],
                5,
                finished_seq_ids=(0,),
                new_sequences=(SequenceSampling(0, (5,), seed=3, temperature=0.8, state_row=0),),
            ),
        ]

    ((expected,),) = serve(model, 1, 1, lambda: steps()[2:])
    driver = tensor * (stages - 1)
    for rank, (drawn, pooled, last) in enumerate(serve(model, tensor, stages, steps)):
        if rank == driver:
            assert drawn.token_ids.tolist() == [-1]
            assert "masks leave no token" in drawn.failed[0]
            assert "the step's output could not be made: MemoryError: no room for a sum" in str(pooled)
            assert last.token_ids.tolist() == expected.token_ids.tolist()
        else:
            assert [len(one.token_ids) for one in (drawn, pooled, last)] == [0, 0, 0]
