"""What stands in the place of tokens' embeddings: the numbers of sources, what steps have of them, and what workers hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.engine.commands import EmbeddedSpans
from hardpoint.engine.embedding_sources import EmbeddingSources
from hardpoint.interfaces import EmbeddingKind, EmbeddingSource
from hardpoint.scheduler import Scheduler, SchedulerConfig

VOCAB, BLOCK = 100, 4


def source(digest: str, *spans: tuple[int, int]) -> EmbeddedSpans:
    count = sum(end - start for start, end in spans)
    rows = np.zeros((count, 1), np.float32)
    return EmbeddedSpans(digest.encode(), EmbeddingSource(EmbeddingKind.ROWS, count, {"rows": rows}), spans)


class Loop:
    """Scheduler and sources as the engine's loop uses them, and a worker that only keeps what it is given."""

    def __init__(self, max_bytes: int = 1 << 20, **settings: int) -> None:
        config = SchedulerConfig(
            block_size=BLOCK, num_device_blocks=64, max_model_len=128, vocab_size=VOCAB, **settings
        )
        self.scheduler, self.sources = Scheduler(config), EmbeddingSources(VOCAB, 1, max_bytes)
        self.held: set[int] = set()
        self.rows: list[tuple[int, int, int]] = []

    def add(self, prompt: Sequence[int], embedded: Sequence[EmbeddedSpans]) -> int:
        contents = self.sources.contents(embedded)
        handle = self.scheduler.add_request(prompt, max_tokens=1, contents=contents)
        self.sources.add([handle], prompt, embedded, contents)
        return handle

    def serve(self, prompt: Sequence[int], embedded: Sequence[EmbeddedSpans]) -> int:
        """Return how many tokens of the prompt the prefix cache had, once it is served; note (position, source, row) of each row used."""
        handle = self.add(prompt, embedded)
        self.rows = []
        while (batch := self.scheduler.schedule()) is not None:
            step = self.sources.of_step(batch)
            for one in () if step is None else step.embedded:
                at = slice(one.first, one.first + one.count)
                assert batch.token_ids[at].tolist() == [prompt[i] for i in batch.positions[at]], "the prompt's own ids"
                rows = range(one.row, one.row + one.count)
                self.rows += [(int(i), one.source, row) for i, row in zip(batch.positions[at], rows, strict=True)]
            if step is not None:
                self.held -= set(step.dropped_sources)
                self.held |= step.new_sources.keys()
                assert {one.source for one in step.embedded} <= self.held, "the worker has what the step uses"
            assert (batch.token_ids < VOCAB).all()
            self.scheduler.update(np.ones(len(batch.sample_rows), np.int64))
        cached = self.scheduler.num_cached_tokens(handle)
        self.sources.remove(handle)
        return cached


def test_a_prefix_is_shared_only_where_its_sources_are_the_same() -> None:
    loop, prompt = Loop(), [1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8, 3]
    assert loop.serve(prompt, [source("cat", (4, 8))]) == 0
    assert loop.serve(prompt, [source("dog", (4, 8))]) == 4
    assert loop.serve(prompt, []) == 4
    assert loop.serve(prompt, [source("cat", (4, 8))]) == 12
    assert loop.serve(prompt, [source("cat", (4, 7))]) == 4


def test_a_source_that_the_workers_lost_is_sent_again() -> None:
    loop, prompt = Loop(), [1, 9, 9, 9, 4]
    loop.serve(prompt, [source("cat", (1, 4))])
    loop.sources.forget_held()
    loop.held.clear()
    loop.scheduler.reset_prefix_cache()
    assert loop.serve(prompt, [source("cat", (1, 4))]) == 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_positions_of_three_axes_go_on_after_the_prompt(chunk: int) -> None:
    """A picture of 2 x 2 behind one token, two tokens after it; a prompt without pictures goes beside it."""
    own = np.array([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])
    expected = {0: np.concatenate((own, [[5, 6]] * 3), axis=1), 1: np.tile(np.arange(5), (3, 1))}
    loop = Loop(max_num_batched_tokens=chunk, max_num_seqs=1 if chunk == 1 else 2)
    embedded = [source("cat", (1, 5))]
    contents = loop.sources.contents(embedded)
    prompt = [1, 9, 9, 9, 9, 2, 3]
    handles = [
        loop.scheduler.add_request(prompt, max_tokens=3, contents=contents),
        loop.scheduler.add_request([4, 5, 6], max_tokens=3),
    ]
    loop.sources.add(handles[:1], prompt, embedded, contents, own)
    found: dict[int, list[list[int]]] = {handle: [] for handle in handles}
    while (batch := loop.scheduler.schedule()) is not None:
        step = loop.sources.of_step(batch)
        given = None if step is None else step.positions
        places = np.broadcast_to(batch.positions, (3, batch.num_tokens)) if given is None else given
        for row, handle in enumerate(batch.seq_ids.tolist()):
            found[handle] += places[:, batch.query_start[row] : batch.query_start[row + 1]].T.tolist()
        loop.scheduler.update(np.ones(len(batch.sample_rows), np.int64))
    assert [found[handle] for handle in handles] == [expected[0].T.tolist(), expected[1].T.tolist()]


@given(
    chunk=st.integers(1, 9),
    room=st.integers(0, 12),
    prompts=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from("abcd")), max_size=4), max_size=6
    ),
)
def test_every_row_is_used_at_its_place_whatever_the_chunks_and_the_room(
    chunk: int, room: int, prompts: list[list[tuple[int, int, str]]]
) -> None:
    loop = Loop(room, max_num_batched_tokens=chunk, max_num_seqs=1)
    for parts in prompts:
        tokens, spans, expected = [1], dict[str, list[tuple[int, int]]](), dict[int, tuple[str, int]]()
        for text, count, name in parts:
            tokens += [2] * text
            name = f"{name}{count}"
            if name not in spans:
                spans[name] = [(len(tokens), len(tokens) + count)]
                expected |= {len(tokens) + row: (name, row) for row in range(count)}
                tokens += [9] * count
        tokens.append(3)
        embedded = [source(name, *places) for name, places in spans.items()]
        cached = loop.serve(tokens, embedded)
        numbers = {loop.sources.number(one): one.digest.decode() for one in embedded}
        found = {position: (numbers[number], row) for position, number, row in loop.rows}
        assert found == {position: value for position, value in expected.items() if position >= cached}
