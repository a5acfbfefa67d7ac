"""Each parameter against its definition; draws against the distribution; independence of the batch, bit for bit.

Of the sampler in torch's operators, and of the CPU backend's native one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import Device, KernelSet
from hardpoint.interfaces.batch import SequenceSampling, TokenLogprobs
from hardpoint.sampling import SamplingParams, ranking
from hardpoint.sampling.random import draws as uniform
from hardpoint.sampling.random import stream_key
from hardpoint.sampling.sampler import Sampled, Sampler
from hardpoint_conformance import sampling_reference

KERNELS: list[KernelSet | None] = [None]


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native":
        KERNELS[0] = pytest.importorskip("hardpoint_cpu.kernels").CpuKernels(Device("cpu", 0, "the host", "cpu"))
    yield
    KERNELS[0] = None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh_row(number: int) -> int:
    """Return the row of the sequence that comes after `number` others."""
    return 3 * number % 7 + 7 * (number // 7)


class Sequences:
    """A sampler, and the row and the number of tokens of each of its sequences."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.sampler = Sampler(columns, kernels=KERNELS[0])
        self.rows: dict[int, int] = {}
        self.counts: dict[int, int] = {}

    def add(self, *sequences: SequenceSampling, row: int | None = None) -> None:
        """Begin sequences, by default in rows that are new and not the next, or in their old ones."""
        placed = []
        for one in sequences:
            place = self.rows.get(one.seq_id, fresh_row(len(self.rows))) if row is None else row
            self.rows[one.seq_id], self.counts[one.seq_id] = place, 0
            placed.append(one if one.state_row == place else replace(one, state_row=place))
        self.sampler.set_rows(placed)

    def outcome(self, logits: torch.Tensor, seq_ids: npt.NDArray[np.int64]) -> Sampled:
        """Sample a token of each sequence."""
        rows = np.array([self.rows[seq_id] for seq_id in seq_ids], np.int32)
        positions = np.array([self.counts[seq_id] for seq_id in seq_ids], np.int32)
        sampled = self.sampler.sample(logits, rows, positions).collect()
        for seq_id in seq_ids.tolist():
            self.counts[seq_id] += 1
        assert self.sampler.last_tokens(rows).tolist() == np.maximum(sampled.token_ids, 0).tolist()
        return sampled

    def sample(
        self, logits: torch.Tensor, seq_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], dict[int, TokenLogprobs]]:
        sampled = self.outcome(logits, seq_ids)
        assert not sampled.failed
        return sampled.token_ids, sampled.logprobs

    def force(self, seq_id: int, token_id: int) -> None:
        """Have a greedy sequence sample a token."""
        logits = torch.zeros(1, self.columns)
        logits[0, token_id] = 1e6
        assert self.sample(logits, np.array([seq_id]))[0].tolist() == [token_id]


def sequence(seq_id: int, seed: int = 0, prompt: tuple[int, ...] = (1,), **values: Any) -> SequenceSampling:
    return SamplingParams(seed=seed, **values).to_sequence_sampling(seq_id, prompt, 0, 0, [])


def draws(logits: torch.Tensor, count: int, **values: Any) -> npt.NDArray[np.int64]:
    """Sample `count` sequences with seeds 0, 1, ... from the same logits."""
    sequences = Sequences(logits.shape[-1])
    one = sequence(0, **values)
    sequences.add(*(replace(one, seq_id=n, seed=n, state_row=fresh_row(n)) for n in range(count)))
    return sequences.sample(logits.expand(count, -1), np.arange(count))[0]


def reachable(logits: torch.Tensor, **values: Any) -> set[int]:
    return set(draws(logits, 1500, **values).tolist())


def expected_distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """The definition, one row, in float64, with a plain sort."""
    scaled = logits.double().numpy() / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < min_p * probabilities.max()] = 0.0
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if top_k:
        probabilities[order[top_k:]] = 0.0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0.0
    return probabilities / probabilities.sum()


def assert_follows(tokens: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-square within five standard deviations of its mean, and nothing outside of the support."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0.0].sum() == 0
    support = probabilities > 0
    expected = probabilities[support] * len(tokens)
    order = np.argsort(expected)
    merged_expected, merged_counts, e, c = [], [], 0.0, 0
    for index in order:
        e, c = e + expected[index], c + int(counts[support][index])
        if e >= 8:
            merged_expected.append(e)
            merged_counts.append(c)
            e, c = 0.0, 0
    merged_expected[-1] += e
    merged_counts[-1] += c
    expected, observed = np.array(merged_expected), np.array(merged_counts)
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < freedom + 5 * np.sqrt(2 * max(freedom, 1)), (statistic, freedom)


def assert_drawn_rightly(logits: torch.Tensor, count: int, **values: Any) -> None:
    """The first draws are the definition's, and `count` of them, where so many are asked for, follow the distribution."""
    one = sequence(0, **values)
    expected = [sampling_reference.sample_row(logits.numpy(), replace(one, seed=seed), []) for seed in range(10)]
    tokens = draws(logits, count if draws_many() else len(expected), **values)
    assert tokens[: len(expected)].tolist() == expected
    if draws_many():
        assert_follows(tokens, expected_distribution(logits, **values))


def draws_many() -> bool:
    """Whether this implementation is asked for thousands of draws: the faster one is, whose tokens are the other's too."""
    return KERNELS[0] is not None or find_spec("hardpoint_cpu") is None


def some_logits(columns: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(columns, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.02, "top_k": 30},
        {"min_p": 0.05, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.02, "top_k": 25, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("columns", [50, 700])
def test_draws_follow_the_defined_distribution(values: dict[str, Any], columns: int) -> None:
    assert_drawn_rightly(some_logits(columns), 10_000, **values)


@pytest.mark.parametrize(
    ("values", "columns", "scale"),
    [
        ({"top_p": 0.95}, 6000, 0.1),
        ({"top_p": 0.2}, 6000, 0.1),
        ({"top_p": 0.5}, 6000, 3.0),
        ({"min_p": 0.9}, 6000, 0.1),
        ({"min_p": 0.8, "top_p": 0.5}, 6000, 0.1),
        ({"top_k": 2000}, 6000, 0.1),
        ({"top_k": 2000, "top_p": 0.5}, 6000, 0.1),
        ({"top_k": 5999}, 6000, 1.0),
        ({"top_k": 6001}, 6000, 1.0),
        ({}, 6007, 1.0),
    ],
)
def test_flat_distributions_beyond_every_window_are_drawn_rightly(
    values: dict[str, Any], columns: int, scale: float
) -> None:
    assert_drawn_rightly(some_logits(columns, scale=scale), 2500, **values)


def test_draws_of_one_sequence_follow_the_distribution_over_its_tokens() -> None:
    logits = some_logits(20)[None]
    sampler = Sequences(20)
    sampler.add(sequence(0, seed=5))
    tokens = np.array([sampler.sample(logits, np.array([0]))[0][0] for _ in range(4000 if draws_many() else 100)])
    first = [sampling_reference.sample_row(logits[0].numpy(), sequence(0, seed=5), [0] * count) for count in range(100)]
    assert tokens[:100].tolist() == first
    if not draws_many():
        return
    assert_follows(tokens, expected_distribution(logits[0]))
    pairs = tokens[:-1] * 20 + tokens[1:]
    joint = np.outer(expected_distribution(logits[0]), expected_distribution(logits[0])).ravel()
    assert_follows(pairs, joint)


def test_uniform_numbers_are_uniform_and_unrelated_between_neighbouring_seeds() -> None:
    keys = np.array([stream_key(seed) for seed in range(2000)], dtype=np.uint64)
    table = np.stack([uniform(keys, np.full(2000, counter)) for counter in range(20)]) / 2**48
    assert table.min() >= 0.0
    assert table.max() < 1.0
    bins = np.bincount((table.ravel() * 100).astype(int), minlength=100)
    assert ((bins - 400) ** 2 / 400).sum() < 99 + 5 * np.sqrt(198)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02


def test_temperature_zero_takes_the_lowest_id_of_the_highest_logit() -> None:
    logits = torch.zeros(3, 500)
    logits[0, [70, 300]] = 2.0
    logits[1, 499] = 1.0
    sampler = Sequences(500)
    for seq_id in range(3):
        sampler.add(sequence(seq_id, temperature=0))
    assert sampler.sample(logits, np.arange(3))[0].tolist() == [70, 499, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.integers(1, 6))
def test_argmax_is_the_first_of_the_highest(columns: int, seed: int, levels: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, (4, columns)).astype(np.float32))
    assert ranking.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 400), st.integers(0, 2**32), st.integers(1, 50))
def test_top_k_is_the_plain_stable_sort(data: st.DataObject, columns: int, seed: int, levels: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, (3, columns)).astype(np.float32))
    k = data.draw(st.integers(1, columns))
    logits[logits == 3] = -0.0
    plain = logits.sort(dim=1, descending=True, stable=True)
    assert ranking.top_k(logits, k).tolist() == plain.indices[:, :k].tolist()


def test_top_k_keeps_exactly_k_the_lower_ids_among_equals() -> None:
    logits = torch.zeros(300)
    logits[250] = 1.0
    assert reachable(logits, top_k=4) == {250, 0, 1, 2}
    assert reachable(logits, top_k=1) == {250}
    assert reachable(logits[:3], top_k=5) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert reachable(logits, top_p=0.5) == {0}
    assert reachable(logits, top_p=0.51) == {0, 1}
    assert reachable(logits, top_p=0.8) == {0, 1, 2}
    assert reachable(logits, top_p=1e-9) == {0}
    assert reachable(logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_that_is_reached_exactly_keeps_no_more() -> None:
    assert reachable(torch.zeros(4), top_p=0.25) == {0}
    assert reachable(torch.zeros(4), top_p=0.5) == {0, 1}
    assert reachable(torch.zeros(4), top_p=0.75) == {0, 1, 2}
    assert reachable(torch.zeros(512), top_p=2 / 512) == {0, 1}
    assert reachable(torch.zeros(512), top_p=2.01 / 512) == {0, 1, 2}


def test_top_p_is_of_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert reachable(logits, top_p=0.6) == {0, 1}
    assert reachable(logits, top_p=0.6, top_k=2) == {0}


def test_min_p_keeps_tokens_by_their_ratio_to_the_best() -> None:
    logits = torch.tensor([0.5, 0.26, 0.12, 0.12]).log()
    assert reachable(logits, min_p=0.5) == {0, 1}
    assert reachable(logits, min_p=0.2) == {0, 1, 2, 3}
    assert reachable(logits, min_p=1.0) == {0}


def test_min_p_is_of_the_distribution_after_temperature() -> None:
    logits = torch.tensor([0.5, 0.26, 0.12, 0.12]).log()
    assert reachable(logits, min_p=0.5, temperature=10.0) == {0, 1, 2, 3}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 60), st.integers(1, 6), st.data())
def test_kept_sets_equal_the_definition_with_many_ties(
    seed: int, columns: int, levels: int, data: st.DataObject
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, columns).astype(np.float32))
    values = {
        "top_k": data.draw(st.integers(0, columns + 1)),
        "top_p": data.draw(st.sampled_from([1.0, 0.93, 0.55, 0.31])),
        "min_p": data.draw(st.sampled_from([0.0, 0.3, 0.9])),
    }
    support = set(np.flatnonzero(expected_distribution(logits, **values)).tolist())
    assert set(draws(logits, 200, **values).tolist()) <= support
    if len(support) <= 4:
        assert reachable(logits, **values) == support


def penalised_logits(logits: torch.Tensor, prompt: tuple[int, ...], output: tuple[int, ...], **values: Any) -> set[int]:
    """Sample `output` (forced), then return the greedy token of the penalised logits."""
    sampler = Sequences(len(logits))
    sampler.add(sequence(0, prompt=prompt, temperature=0, **values))
    for token_id in output:
        sampler.force(0, token_id)
    return set(sampler.sample(logits[None], np.array([0]))[0].tolist())


def test_presence_penalty_is_subtracted_once_from_generated_tokens() -> None:
    logits = torch.tensor([3.0, 2.5, 0.0])
    assert penalised_logits(logits, (0,), (), presence_penalty=1.0) == {0}
    assert penalised_logits(logits, (), (0, 0, 0), presence_penalty=0.4) == {0}
    assert penalised_logits(logits, (), (0,), presence_penalty=0.6) == {1}


def test_frequency_penalty_is_subtracted_for_each_time_a_token_was_generated() -> None:
    logits = torch.tensor([3.0, 2.5, 0.0])
    assert penalised_logits(logits, (0, 0, 0, 0), (), frequency_penalty=0.2) == {0}
    assert penalised_logits(logits, (), (0, 0), frequency_penalty=0.2) == {0}
    assert penalised_logits(logits, (), (0, 0, 0), frequency_penalty=0.2) == {1}
    assert penalised_logits(logits, (), (2, 2, 2), frequency_penalty=-1.5) == {2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert penalised_logits(torch.tensor([3.0, 2.5, 0.0]), (0,), (), repetition_penalty=1.25) == {1}
    assert penalised_logits(torch.tensor([3.0, 2.5, 0.0]), (2,), (0,), repetition_penalty=1.25) == {1}
    assert penalised_logits(torch.tensor([3.0, 2.5, 0.0]), (0,), (), repetition_penalty=1.15) == {0}
    assert penalised_logits(torch.tensor([-1.0, -1.2, -9.0]), (0,), (), repetition_penalty=1.3) == {1}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 19)), st.lists(st.integers(0, 19), max_size=90), st.integers(0, 1000))
def test_all_penalties_together_give_the_formulas_distribution(prompt: list[int], output: list[int], seed: int) -> None:
    logits = some_logits(20, seed)
    repetition, frequency, presence = 1.3, 0.2, 0.5
    expected = logits.clone()
    for token_id in set(prompt) | set(output):
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id in set(output):
        expected[token_id] -= frequency * output.count(token_id) + presence
    values = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    assert penalised_logits(logits, tuple(prompt), tuple(output), **values) == {int(expected.argmax())}


def test_a_sequences_own_samples_are_penalised() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    sampler = Sequences(4)
    sampler.add(sequence(0, temperature=0, presence_penalty=2.0, frequency_penalty=2.0))
    assert [int(sampler.sample(logits, np.array([0]))[0][0]) for _ in range(5)] == [0, 1, 2, 3, 0]


def test_logit_bias_is_added() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert reachable(logits, temperature=0, logit_bias={0: 3.5}) == {0}
    assert reachable(logits, logit_bias={3: -100, 2: -100}) == {0, 1}
    tokens = draws(logits, 4000, logit_bias={1: 0.7})
    assert_follows(tokens, expected_distribution(logits + torch.tensor([0.0, 0.7, 0.0, 0.0])))


def test_only_allowed_tokens_are_sampled_whatever_their_bias() -> None:
    logits = some_logits(100)
    assert reachable(logits, allowed_token_ids=[5, 60, 61]) == {5, 60, 61}
    assert reachable(logits, allowed_token_ids=[60], logit_bias={3: 100.0}) == {60}


def test_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampler = Sequences(3)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
    sampler.add(params.to_sequence_sampling(0, [1], 0, 0, [2]))
    ids = np.array([0])
    assert [int(sampler.sample(logits, ids)[0][0]) for _ in range(4)] == [0, 0, 2, 2]


def test_logits_are_not_changed() -> None:
    logits = some_logits(200)[None].repeat(2, 1)
    before = logits.clone()
    sampler = Sequences(200)
    values = {"repetition_penalty": 1.5, "logit_bias": {1: 5.0}, "allowed_token_ids": [1, 2], "logprobs": 2, "top_k": 2}
    sampler.add(sequence(0, **values))
    sampler.add(sequence(1, temperature=0.5))
    sampler.sample(logits, np.arange(2))
    assert torch.equal(logits, before)


VARIED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 900, "temperature": 2.0},
    {"top_k": 3000, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 3.0},
    {"top_p": 0.999, "temperature": 9.0},
    {"min_p": 0.2},
    {"min_p": 0.001, "temperature": 5.0},
    {"min_p": 0.001, "top_p": 0.9, "temperature": 5.0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0, "frequency_penalty": 1.0},
    {"logit_bias": {3: 4.0}},
    {"logprobs": 3},
    {"temperature": 0, "logprobs": 7},
]


@pytest.mark.parametrize("columns", [5003, 49152])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16-ties"])
def test_a_rows_result_is_the_same_bit_for_bit_alone_and_in_any_batch(columns: int, rounded: bool) -> None:
    # Two threads: where an operator splits a long row between them, one row alone is rounded otherwise than among others.
    torch.set_num_threads(2)
    steps, count = 2, len(VARIED)
    logits = some_logits(steps * count * columns, 1, 2.5).view(steps, count, columns)
    if rounded:
        logits = logits.bfloat16().float()
    together = Sequences(columns)
    alone = [Sequences(columns) for _ in range(count)]
    for seq_id in range(count):
        sampling = sequence(seq_id, seed=seq_id, prompt=(1, 2, 3), **VARIED[seq_id])
        together.add(sampling)
        alone[seq_id].add(sampling)
    for step in range(steps):
        order = np.random.default_rng(step).permutation(count)
        tokens, logprobs = together.sample(logits[step, order], order)
        for row, seq_id in enumerate(order.tolist()):
            token, logprob = alone[seq_id].sample(logits[step, seq_id : seq_id + 1], np.array([seq_id]))
            assert token[0] == tokens[row], VARIED[seq_id]
            assert (0 in logprob) == (row in logprobs)
            if 0 in logprob:
                assert logprob[0].logprobs.tobytes() == logprobs[row].logprobs.tobytes()
                assert logprob[0].token_ids.tolist() == logprobs[row].token_ids.tolist()


def test_a_seed_gives_the_same_tokens_whatever_steps_a_sequence_sits_out() -> None:
    logits = some_logits(100)[None]

    def run(pauses: set[int]) -> list[int]:
        sampler = Sequences(100)
        sampler.add(sequence(0, seed=11))
        sampler.add(sequence(1, seed=12))
        tokens = []
        for step in range(12):
            if step in pauses:
                sampler.sample(logits, np.array([1]))
            else:
                tokens.append(int(sampler.sample(logits, np.array([0]))[0][0]))
        return tokens

    assert run({3, 4, 8}) == run(set())[:9]


def test_seeds_differ() -> None:
    logits = torch.zeros(1, 1000)
    outputs = set()
    for seed in range(20):
        sampler = Sequences(1000)
        sampler.add(sequence(0, seed=seed))
        outputs.add(tuple(int(sampler.sample(logits, np.array([0]))[0][0]) for _ in range(3)))
    assert len(outputs) == 20


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = some_logits(5 * 300, 4).view(5, 300)
    sampler = Sequences(300)
    for seq_id in range(5):
        values = {"temperature": 5.0, "top_k": 50, "repetition_penalty": 1.4, "logit_bias": {7: 3.0}}
        sampler.add(sequence(seq_id, seed=seq_id, logprobs=seq_id if seq_id else None, **values))
    tokens, logprobs = sampler.sample(logits, np.arange(5))
    assert sorted(logprobs) == [1, 2, 3, 4]
    expected = torch.log_softmax(logits.double(), dim=1)
    for row, entry in logprobs.items():
        assert entry.token_ids[0] == tokens[row]
        assert entry.token_ids[1:].tolist() == expected[row].topk(row).indices.tolist()
        assert entry.logprobs.dtype == np.float32
        np.testing.assert_allclose(entry.logprobs, expected[row][torch.from_numpy(entry.token_ids)], atol=1e-5)
        assert entry.rank == int((expected[row] > expected[row][tokens[row]]).sum()) + 1


def test_logprobs_zero_returns_the_sampled_token_only() -> None:
    sampler = Sequences(10)
    sampler.add(sequence(0, temperature=0, logprobs=0))
    logits = torch.arange(10.0)[None]
    _, logprobs = sampler.sample(logits, np.array([0]))
    assert logprobs[0].token_ids.tolist() == [9]
    assert logprobs[0].rank == 1


def test_rows_are_used_again() -> None:
    """Of all that a sequence may have brought to its row, the next one has nothing."""
    sampler = Sequences(70)
    logits = some_logits(70)[None]
    best = int(logits.argmax())
    rich = {"allowed_token_ids": [3], "logit_bias": {4: 9.0}, "presence_penalty": 2.0, "min_tokens": 5, "logprobs": 1}
    for number in range(40):
        sampler.add(sequence(0, temperature=0, stop_token_ids=[best], **rich), row=number % 3)
        assert sampler.sample(logits, np.array([0]))[0][0] == 3
        sampler.add(sequence(0, temperature=0), row=number % 3)
        tokens, logprobs = sampler.sample(logits, np.array([0]))
        assert (tokens[0], len(logprobs)) == (best, 0)
    tables = sampler.sampler._table.tables
    assert max(len(tables.masks), len(tables.biases), len(tables.history)) <= 4


def test_a_history_is_the_rows_own() -> None:
    sampler = Sequences(40)
    logits = torch.arange(40.0)[None] / 10
    for _ in range(3):
        sampler.add(*(sequence(seq_id, temperature=0, frequency_penalty=2.0) for seq_id in range(5)))
        for seq_id in (0, 0, 3):
            sampler.sample(logits, np.array([seq_id]))
        tokens = sampler.sample(logits.expand(5, -1), np.arange(5))[0]
        assert tokens.tolist() == [37, 39, 39, 38, 39]


def test_many_sequences_come_and_go() -> None:
    sampler = Sequences(30)
    logits = some_logits(30).expand(300, -1)
    rng = np.random.default_rng(0)
    alive: set[int] = set()
    free = list(range(1000))
    for start in range(0, 3000, 300):
        for seq_id in range(start, start + 300):
            if not free:
                gone = int(rng.choice(sorted(alive)))
                alive.remove(gone)
                free.append(sampler.rows[gone])
            sampler.add(sequence(seq_id, temperature=0, allowed_token_ids=[seq_id % 30]), row=free.pop())
            alive.add(seq_id)
        asked = rng.permutation(sorted(alive))[:300]
        assert (sampler.sample(logits[: len(asked)], asked)[0] == asked % 30).all()


def test_rows_that_were_not_set_are_an_error() -> None:
    sampler = Sampler(10, kernels=KERNELS[0])
    with pytest.raises(ValueError, match="-1"):
        sampler.set_rows([sequence(3)])
    sampler.set_rows([replace(sequence(3), state_row=3)])
    for row in (-1, 10_000):
        with pytest.raises(ValueError, match=str(row)):
            sampler.sample(torch.zeros(2, 10), np.array([3, row], np.int32), np.zeros(2, np.int32))


KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_k": 200},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_p": 0.5, "top_k": 9},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
]


@pytest.mark.parametrize("values", KINDS, ids=str)
@pytest.mark.parametrize("columns", [400, 5000])
def test_a_row_without_a_token_fails_alone(values: dict[str, Any], columns: int) -> None:
    logits = some_logits(4 * columns).view(4, columns)
    sampler, alone = Sequences(columns), Sequences(columns)
    for seq_id in range(4):
        sampler.add(sequence(seq_id, seed=seq_id, **values))
    alone.add(sequence(3, seed=3, **values))
    expected = alone.sample(logits[3:], np.array([3]))[0][0]
    logits[0, 77] = torch.nan
    logits[1, columns - 1] = torch.inf
    logits[2] = -torch.inf
    sampled = sampler.outcome(logits, np.arange(4))
    assert sampled.token_ids.tolist() == [-1, -1, -1, expected]
    assert sorted(sampled.failed) == [0, 1, 2]
    assert "NaN or infinity" in sampled.failed[0]
    assert "NaN or infinity" in sampled.failed[1]
    assert "masks leave no token" in sampled.failed[2]
    assert sorted(sampled.logprobs) == ([3] if "logprobs" in values else [])


def no_token_left(values: dict[str, Any]) -> SequenceSampling:
    return replace(sequence(0, **values), allowed_token_ids=(4,), min_tokens=1, stop_token_ids=frozenset({4}))


@pytest.mark.parametrize("values", KINDS, ids=str)
def test_masks_that_leave_no_token_fail_the_row_until_they_leave_one(values: dict[str, Any]) -> None:
    sampler = Sequences(400)
    sampler.add(no_token_left(values), sequence(1, temperature=0))
    logits = some_logits(400)[None].expand(2, -1)
    first = sampler.outcome(logits, np.arange(2))
    assert first.token_ids.tolist() == [-1, int(logits[0].argmax())]
    assert sampler.sample(logits, np.arange(2))[0][0] == 4


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-45, "temperature": 0.0},
        {"repetition_penalty": 1e-40, "temperature": 1.0},
        {"repetition_penalty": 1e300, "temperature": 1.0},
        {"temperature": 1e308, "allowed_token_ids": (2, 3)},
        {"temperature": 1e308, "top_p": 1e-320},
        {"temperature": 1e-5, "top_k": 2**70, "min_p": 1e-320},
        {"temperature": 1.0, "min_tokens": 2**70, "stop_token_ids": frozenset(range(400))},
        {"temperature": 1.0, "logit_bias": {3: 3e38, 4: -3e38}},
        {"temperature": 1.0, "frequency_penalty": 1e38, "presence_penalty": -1e38},
    ],
    ids=str,
)
def test_extreme_numbers_are_a_matter_of_their_row(extreme: dict[str, Any]) -> None:
    logits = some_logits(400)[None].expand(3, -1)
    sampler = Sequences(400)
    extreme_one = SequenceSampling(0, (1, 2, 3), seed=1, **extreme)
    sampler.add(sequence(1, temperature=0), extreme_one, sequence(2, seed=5))
    output: list[int] = []
    for _ in range(3):
        sampled = sampler.outcome(logits, np.array([1, 0, 2]))
        expected = sampling_reference.sample_row(logits[0].numpy(), extreme_one, output)
        assert sampled.token_ids[0] == logits[0].argmax()
        assert sampled.token_ids[1] == max(expected, -1)
        assert sorted(sampled.failed) == ([1] if expected < 0 else [])
        output += [expected] if expected >= 0 else []


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_extreme_temperatures_and_masked_tokens_give_tokens(values: dict[str, Any]) -> None:
    logits = some_logits(400, scale=30.0)
    logits[::2] = -torch.inf
    best = int(logits.argmax())
    assert set(draws(logits, 50, temperature=1e-4, **values).tolist()) == {best}
    assert all(token % 2 for token in draws(logits, 500, temperature=1e6, **values).tolist())


MIXED: list[dict[str, Any]] = [
    *VARIED,
    {"top_k": 20, "top_p": 0.6, "min_p": 0.01},
    {"min_tokens": 2, "stop_token_ids": (1, 2, 3), "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"allowed_token_ids": (5, 6, 60), "logit_bias": {5: -3.0}, "presence_penalty": 1.5},
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sampled_from([61, 64, 127, 700, 5003]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.sampled_from(["float32", "bfloat16", "integers"]),
)
def test_tokens_are_those_of_the_definition(seed: int, columns: int, scale: float, numbers: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(MIXED)
    sequences = [sequence(i, seed=seed + i, prompt=(1, 2, 3), **values) for i, values in enumerate(MIXED)]
    sampler = Sequences(columns)
    sampler.add(*sequences)
    outputs: list[list[int]] = [[] for _ in sequences]
    for _ in range(3):
        logits = scale * torch.randn(count, columns, generator=generator)
        logits = {"float32": logits, "bfloat16": logits.bfloat16().float(), "integers": logits.round()}[numbers]
        tokens, logprobs = sampler.sample(logits, np.arange(count))
        for row, (one, output) in enumerate(zip(sequences, outputs, strict=True)):
            expected = sampling_reference.sample_row(logits[row].numpy(), one, output)
            assert tokens[row] == expected, MIXED[row]
            output.append(expected)
            if one.logprobs is not None:
                plain = sampling_reference.row_logprobs(logits[row].numpy(), expected, one.logprobs)
                assert logprobs[row].token_ids.tolist() == plain.token_ids.tolist()
                assert logprobs[row].rank == plain.rank
                np.testing.assert_allclose(logprobs[row].logprobs, plain.logprobs, atol=1e-5)


def sampling_of(seq_id: int, **values: Any) -> SequenceSampling:
    return SamplingParams(**values).to_sequence_sampling(seq_id, (1, 2), 0, seq_id, [])


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 4},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {5: 2.0}, "seed": 5},
]


def with_processors(processors: dict[int, Any], steps: int = 6) -> list[Sampled]:
    """Sample sequences in all ways, of which some have a function for their logits."""
    generator, sampler = torch.Generator().manual_seed(1), Sequences(60)
    for seq_id, way in enumerate(WAYS):
        sampler.add(sampling_of(seq_id, **way, logits_processors=processors.get(seq_id)))
    seq_ids = np.arange(len(WAYS))
    return [sampler.outcome(2 * torch.randn(len(WAYS), 60, generator=generator), seq_ids) for _ in range(steps)]


def test_processors_that_change_nothing_change_no_token() -> None:
    def same(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    plain, processed = with_processors({}), with_processors({row: [same, same] for row in range(len(WAYS))})
    for one, other in zip(plain, processed, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs[3].logprobs.tolist() == other.logprobs[3].logprobs.tolist()


def test_a_processor_is_given_the_tokens_so_far_and_changes_its_own_row_alone() -> None:
    seen: list[list[int]] = []

    def never_twice(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids)
        logits[token_ids] = -torch.inf
        return logits

    plain, processed = with_processors({}, 30), with_processors({3: [never_twice]}, 30)
    given = [step.token_ids[3] for step in processed]
    assert len(set(given)) == 30
    assert seen == [given[:count] for count in range(30)]
    for one, other in zip(plain, processed, strict=True):
        assert np.delete(one.token_ids, 3).tolist() == np.delete(other.token_ids, 3).tolist()
        best = other.logprobs[3].token_ids[1:].tolist(), other.logprobs[3].logprobs[1:].tolist()
        assert best == (one.logprobs[3].token_ids[1:].tolist(), one.logprobs[3].logprobs[1:].tolist()), (
            "of the model's own"
        )


def test_processors_are_those_of_the_definition() -> None:
    def halved(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits / 2 + len(token_ids)

    def first_banned(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([7]), -torch.inf)

    generator, sampler = torch.Generator().manual_seed(2), Sequences(60)
    wanted = [sampling_of(i, **way, logits_processors=[halved, first_banned]) for i, way in enumerate(WAYS)]
    sampler.add(*wanted)
    outputs: list[list[int]] = [[] for _ in WAYS]
    for _ in range(5):
        logits = 2 * torch.randn(len(WAYS), 60, generator=generator)
        expected = [sampling_reference.sample_row(logits[i].numpy(), one, outputs[i]) for i, one in enumerate(wanted)]
        assert sampler.outcome(logits, np.arange(len(WAYS))).token_ids.tolist() == expected
        for output, token in zip(outputs, expected, strict=True):
            output.append(token)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda token_ids, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda token_ids, logits: None, "returned NoneType instead of a tensor of shape [60]"),
        (lambda token_ids, logits: logits[:5], "returned one of shape [5]"),
        (lambda token_ids: token_ids, "TypeError"),
    ],
    ids=["raises", "nothing", "shape", "arguments"],
)
def test_a_processor_that_fails_ends_its_own_row(wrong: Any, found: str) -> None:
    plain, processed = with_processors({}, 1)[0], with_processors({1: [wrong]}, 1)[0]
    assert processed.failed.keys() == {1}
    assert found in processed.failed[1]
    assert processed.token_ids.tolist() == [*plain.token_ids[:1], -1, *plain.token_ids[2:]]
    assert processed.logprobs.keys() == plain.logprobs.keys()


def test_words_that_must_not_come_cost_a_token_little_however_many_they_are() -> None:
    many = [(*divmod(number, 100), 64 + number % 50) for number in range(10_000)]
    words = (*many, (7, 3), (5, 7, 9), (8, 8, 8, 3))
    sampler, logits = Sequences(128), torch.zeros(1, 128)
    logits[0, 3], logits[0, 9], logits[0, 4] = 3.0, 2.0, 1.0
    sampler.add(replace(sequence(0, temperature=0.0), bad_words=words))
    start = time.process_time()
    for before, token in (((), 3), ((5, 7), 4), ((6, 7), 9), ((8, 8), 3), ((8, 8, 8), 9)):
        sampler.add(replace(sequence(0, temperature=0.0), bad_words=words))
        for one in before:
            sampler.force(0, one)
        assert sampler.sample(logits, np.array([0]))[0].tolist() == [token]
    for _ in range(200):
        sampler.sample(logits, np.array([0]))
    assert time.process_time() - start < 0.25


def test_a_rehearsal_takes_the_room_that_sequences_need() -> None:
    sampler = Sequences(300)
    sampler.sampler.rehearse(5)
    before = sampler.sampler._table.tables
    rich: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": [1], "logit_bias": {0: 1.0}, "presence_penalty": 1.0}
    for _ in range(2):
        for row in range(5):
            sampler.add(sampling_of(row, **rich, allowed_token_ids=[0, 1, 2]), row=row)
    after = sampler.sampler._table.tables
    assert len(after.masks) == len(before.masks) >= 10
    assert len(after.biases) == len(before.biases) >= 5
    assert len(after.history) == len(before.history) >= 5
    sampler.outcome(torch.zeros(5, 300), np.arange(5))
