"""A model on several ranks: the same tokens, one sleep for all, and nothing left when a rank is killed.

Starting ranks takes seconds, so there are three engines in all, one after the other in this process, and many checks with each. Each
engine after the first is also the proof that a new one works where one has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.sleep import EngineState
from hardpoint.executor import RemoteExecutor
from hardpoint.interfaces import BUFFERS, WEIGHTS, SleepPlan
from hardpoint.interfaces.errors import EngineDead, HostBudgetExceeded, RankFailed, WeightsMissing
from hardpoint_conformance.tiny_model import Model
from tests.e2e.conftest import Oracle
from tests.e2e.extremes import (
    PROMPT,
    Beside,
    batches,
    check_that_a_request_of_nan_ends_alone,
    combined,
    single,
    together,
)
from tests.leaks import Belongings

pytestmark = pytest.mark.timeout(900)

Make = Callable[..., LLM]
Weights = Mapping[str, torch.Tensor]

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 22, 7, 301], list(range(40, 52)), [11, 12, 11, 12, 13])]
TOKENS = 16
REPORTED_WITHIN = 45.0
ROUNDING = 2e-3
"""By how much the logits of float32 inference may differ between two orders of its sums; ten times what was seen."""


@pytest.fixture(scope="module")
def oracle(shallow: Model) -> Oracle:
    return Oracle.of(shallow)


@pytest.fixture(scope="module")
def make(shallow: Model) -> Callable[..., LLM]:
    """Return what makes an engine."""
    small = {"max_model_len": 256, "num_device_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return partial(LLM, shallow.path, dtype="float32", backend="cpu", skip_tokenizer_init=True, **small)


def _check_tokens(llm: LLM, oracle: Oracle, params: SamplingParams) -> None:
    """Greedy tokens by the logit-margin rule: the oracle prefers no other token by more than the rounding of its logits."""
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        chosen = list(output.outputs[0].token_ids)
        assert len(chosen) == TOKENS
        logits = oracle.logits([*output.prompt_token_ids, *chosen], len(output.prompt_token_ids))
        margin = logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
        assert float(margin.max()) <= ROUNDING
        assert int((margin > 0).sum()) <= 1, "nearly all tokens are the oracle's own"


def _check_prompt_logprobs(llm: LLM, oracle: Oracle) -> None:
    """Log probabilities of prompts, which all ranks of the last stage compute and one ranks."""
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False):
        tokens = list(output.prompt_token_ids)
        expected = oracle.logits(tokens, 1).log_softmax(-1)
        assert output.prompt_logprobs is not None
        for token, entry, row in zip(tokens[1:], output.prompt_logprobs[1:], expected, strict=True):
            assert entry is not None
            assert abs(entry[token].logprob - float(row[token])) < 1e-4


def _check_that_a_prompt_is_found_after_a_sleep(llm: LLM, params: SamplingParams) -> None:
    prompt = {"prompt_token_ids": list(range(100, 200))}
    answers = []
    for _ in range(2):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        answers.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
        llm.sleep()
        llm.wake_up()
    assert (answers[0][1], answers[1][1]) == (0, 96)
    assert answers[0][0] == answers[1][0]
    assert llm.stats().offload_host_hits > 0


def _check_dead(llm: LLM, rank: int) -> None:
    """A dead engine says so, whatever it is asked, and can be shut down."""
    engine = llm.engine
    assert not engine.has_unfinished_requests()
    status = llm.sleep_status()
    assert status.state is EngineState.FAILED
    assert f"rank {rank} failed" in (status.failure or "")
    with pytest.raises(EngineDead, match=f"rank {rank} failed"):
        engine.add_request("late", PROMPTS[0], SamplingParams())
    for use in (engine.step, llm.sleep, llm.wake_up, llm.reload_weights):
        with pytest.raises(EngineDead):
            use()
    llm.shutdown()
    llm.shutdown()


@pytest.fixture(scope="module")
def nothing_left() -> Iterator[Callable[[], list[str]]]:
    """Return what this process holds now and did not hold before."""
    before = Belongings.now()

    def new() -> list[str]:
        return Belongings.now().new_since(before)

    yield new
    assert new() == []


def _compute(llm: LLM, steps: int) -> None:
    for _ in range(steps):
        llm.engine.step()


def _pids(llm: LLM) -> list[int]:
    executor = llm.engine._loop.core.executor
    assert isinstance(executor, RemoteExecutor)
    return executor.pids


def _files(process: int) -> dict[str, str]:
    """Return what a process has open: path of the descriptor, and what it is."""
    found = {}
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which they are listed
            found[str(file)] = os.readlink(file)
    return found


def _listening() -> set[str]:
    """Return the sockets at which this process listens."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"} & set(_files(os.getpid()).values())


def _check_that_no_other_user_reaches_where_ranks_meet(llm: LLM, listening_before: set[str]) -> None:
    """The store is a file without a name, and nobody serves it on a port."""
    stores = [
        file
        for process in [os.getpid(), *_pids(llm)]
        for file, target in _files(process).items()
        if "hardpoint-rendezvous" in target
    ]
    assert len(stores) == 1 + llm.info.num_ranks
    assert not _listening() - listening_before
    if os.geteuid() == 0:  # who may be somebody else
        tries = 'for file; do cat "$file" || echo refused; done'
        said = subprocess.run(
            ["sh", "-c", tries, "sh", *stores],
            user=65534,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        assert said.stdout.split() == ["refused"] * len(stores)


def _check_that_one_rank_rolls_back_all(llm: LLM) -> None:
    """A budget that suffices for the smaller of two ranks alone puts none to sleep."""
    executor = llm.engine._loop.core.executor
    before = [status.memory for status in executor.call("status")]
    sizes = [stats.tags[WEIGHTS].allocated + stats.tags[BUFFERS].allocated for stats in before]
    assert sizes[0] > sizes[1], "rank 0 has two of the three KV heads"
    plan = SleepPlan(tags=frozenset({WEIGHTS, BUFFERS}), host_budget=sum(sizes) // 2)
    with pytest.raises(HostBudgetExceeded, match="rank 0") as caught:
        executor.change(plan)
    assert caught.value.rank == 0
    after = [status.memory for status in executor.call("status")]
    assert [(stats.tags, stats.asleep) for stats in after] == [(stats.tags, frozenset()) for stats in before]


def _check_that_logits_that_are_no_numbers_end_their_requests(llm: LLM, weights: Weights) -> None:
    """They are found by the driver alone, when it samples: the requests end with an error, and all ranks go on."""
    engine, norm = llm.engine, "model.norm.weight"
    llm.update_weights([(norm, weights[norm] * torch.nan)])
    engine.add_request("drawn", PROMPTS[0], SamplingParams(temperature=0.7, max_tokens=4))
    engine.add_request("beside it", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=4))
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == ["beside it", "drawn"]
    for output in outputs:
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
    assert not engine.has_unfinished_requests()
    assert engine.stats().blocks_used == 0
    assert llm.sleep_status().state is EngineState.RUNNING
    llm.reload_weights()


def _check_that_extremes_end_alone(llm: LLM, model: Model, oracle: Oracle) -> None:
    """A sample of what `test_extremes.py` tries; only the driver samples, and the others learn of what it cannot."""
    logits, vocabulary = oracle.logits([*PROMPT, 0], len(PROMPT))[0].numpy(), model.shape.vocab
    beside = Beside(llm.engine, logits, exact=False)
    some = [*together(vocabulary), *single(vocabulary)[::15], *combined(vocabulary, 50)]
    for trials in batches([one | {"max_tokens": 4} for one in some]):
        beside.try_params(trials)
    assert not beside.wrong, "\n".join(beside.wrong)
    assert min(beside.counts.values()) > 0
    check_that_a_request_of_nan_ends_alone(llm, logits, model.weights["model.embed_tokens.weight"])


def test_two_ranks_share_each_layer(
    make: Make, shallow: Model, oracle: Oracle, greedy: Any, nothing_left: Callable[[], list[str]]
) -> None:
    listening_before = _listening()
    with make(tensor_parallel_size=2, kv_offload_gib=0.02) as llm:
        assert (llm.info.num_ranks, llm.info.path, llm.info.num_device_blocks) == (2, "modules", 64)
        assert len(_pids(llm)) == 2
        _check_tokens(llm, oracle, greedy(TOKENS))
        _check_prompt_logprobs(llm, oracle)
        _check_that_logits_that_are_no_numbers_end_their_requests(llm, shallow.weights)
        _check_that_extremes_end_alone(llm, shallow, oracle)
        _check_tokens(llm, oracle, greedy(TOKENS))

        seen: list[tuple[int, int]] = []
        report = llm.sleep(tier="disk", progress=lambda done, total: seen.append((done, total)))
        assert report.freed >= llm.info.weight_bytes
        assert seen
        assert llm.wake_up().state is EngineState.RUNNING
        _check_tokens(llm, oracle, greedy(TOKENS))
        _check_that_a_prompt_is_found_after_a_sleep(llm, greedy(TOKENS))

        _check_that_no_other_user_reaches_where_ranks_meet(llm, listening_before)
        _check_that_one_rank_rolls_back_all(llm)
        _check_tokens(llm, oracle, greedy(TOKENS))

        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(WeightsMissing):
            llm.generate(PROMPTS[0])
        names = sorted(shallow.weights)
        assert llm.update_weights((name, shallow.weights[name]) for name in names[:10]) == 10
        assert llm.sleep_status().missing_weights == len(names) - 10
        assert llm.reload_weights() == len(names)
        _check_tokens(llm, oracle, greedy(TOKENS))

        # Killed while it decodes.
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), prompt, greedy(200))
        _compute(llm, 5)
        os.kill(_pids(llm)[1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankFailed, match="ended by SIGKILL") as raised:
            _compute(llm, 50)
        assert time.monotonic() - killed < REPORTED_WITHIN
        assert raised.value.rank == 1
        _check_dead(llm, rank=1)
    assert nothing_left() == []


def test_two_stages_divide_the_layers(
    make: Make, shallow: Model, oracle: Oracle, greedy: Any, nothing_left: Callable[[], list[str]]
) -> None:
    with make(pipeline_parallel_size=2) as llm:
        assert (llm.info.num_ranks, llm.info.pipeline_parallel_size) == (2, 2)
        _check_that_logits_that_are_no_numbers_end_their_requests(llm, shallow.weights)
        _check_tokens(llm, oracle, greedy(TOKENS))
        _check_prompt_logprobs(llm, oracle)
        embeddings = llm.embed(PROMPTS[:1], use_tqdm=False)
        assert embeddings[0].outputs.embedding.shape == (576,)
        assert llm.reload_weights() == len(shallow.weights)

        # Killed while it goes to sleep.
        killed: list[float] = []

        def kill(done: int, total: int) -> None:
            if not killed:
                killed.append(time.monotonic())
                os.kill(_pids(llm)[1], signal.SIGKILL)

        llm.engine.add_request("held", PROMPTS[0], greedy(200))
        llm.engine.step()
        with pytest.raises(RankFailed, match="rank 1 failed"):
            llm.sleep(mode="keep", tier="disk", progress=kill)
        assert time.monotonic() - killed[0] < REPORTED_WITHIN
        with pytest.raises(EngineDead):
            llm.engine.step()
        _check_dead(llm, rank=1)
    assert nothing_left() == []


def test_a_rank_killed_while_it_starts_is_an_error_of_the_start(
    make: Make, nothing_left: Callable[[], list[str]], cold_processes: None
) -> None:
    killed: list[float] = []
    ended = threading.Event()

    def kill() -> None:
        # At the first sight of a rank, which takes several tenths of a second to start.
        while not (killed or ended.is_set()):
            for rank in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                for pid in map(int, rank.read_text().split()):
                    with contextlib.suppress(OSError):  # one that has ended meanwhile
                        if b"hardpoint.executor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            os.kill(pid, signal.SIGKILL)
                            killed.append(time.monotonic())
                            return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(RankFailed, match="ended by SIGKILL"):
            make(tensor_parallel_size=2)
    finally:
        ended.set()
        killer.join()
    assert time.monotonic() - killed[0] < REPORTED_WITHIN
    assert nothing_left() == []
