"""Whatever the load, every step finds each sequence's own keys and values in its slots, and every sequence gets its tokens.

`SimulatedWorker` stands for a model: it keeps, for every slot, which history was written there, carries out the swap and copy
lists, and checks on each step that all slots of each scheduled sequence hold exactly its own history. It samples each token when
the step is planned, and `Driver` gives it back up to `steps_in_flight` steps later, predicts when each sequence has to end, and
checks the rules of a step (budget, order of rows, samples).
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardpoint.interfaces.batch import StepBatch, TierMoves
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.scheduler import FinishReason, Scheduler, SchedulerConfig, SequenceState

VOCABULARY = 5


@dataclass
class Expected:
    """What the driver knows of one sequence."""

    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop_ids: set[int]
    salt: str
    generation: int
    pooling: bool
    plan_ahead: bool = True
    beams_of: int | None = None
    output: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    sampled: list[int] = field(default_factory=list)
    """On the device: the output, and tokens of steps in flight."""

    @property
    def history(self) -> list[int]:
        return self.prompt + self.output

    @property
    def device_history(self) -> list[int]:
        return self.prompt + self.sampled


Held = tuple[tuple[int, int], int]
"""KV cache group and id of a history, and the generation of the cache that it was written in."""


def max_seq_tokens(config: SchedulerConfig) -> int:
    """Return the most tokens that one sequence can reach."""
    return min(config.max_model_len, config.pool_tokens)


class SimulatedWorker:
    """Keys and values as ids of token histories: equal ids mean equal salt and tokens up to that position."""

    def __init__(self, block_size: int, windows: tuple[int, ...], *, keeps_states: bool) -> None:
        self.block_size, self.windows, self.keeps_states = block_size, windows, keeps_states
        # Recurrent states by rows, each the id of the history that led to it.
        self.states: dict[int, int] = {}
        self.device: dict[int, Held] = {}
        self.host: dict[int, Held] = {}
        # Of each slot of the tiers, the tag and what each token of the block holds.
        self.tiers: dict[int, tuple[int, list[Held]]] = {}
        self.generation = 0
        self.last_tokens: dict[int, int] = {}
        self._ids: dict[tuple[object, int], int] = {}

    def histories(self, tokens: list[int], salt: str) -> list[int]:
        ids: list[int] = []
        parent: object = salt
        for token in tokens:
            parent = self._ids.setdefault((parent, token), len(self._ids))
            ids.append(parent)
        return ids

    def _move(self, source: dict[int, Held], target: dict[int, Held], pairs: Any) -> None:
        for a, b in pairs.tolist():
            for offset in range(self.block_size):
                value = source.get(a * self.block_size + offset)
                if value is None:
                    target.pop(b * self.block_size + offset, None)
                else:
                    target[b * self.block_size + offset] = value

    def move_tiers(self, moves: TierMoves | None) -> list[int]:
        """Do the moves and return the loads that fail, for which blocks are void."""
        if moves is None:
            return []
        size = self.block_size
        for source, slot, tag in moves.demotions.tolist():
            self.tiers[slot] = self.tiers.get(source, (0, []))
            assert self.tiers[slot][0] in (tag, 0), "a demotion comes too late"
        for block, slot, tag in moves.stores.tolist():
            self.tiers[slot] = (tag, [self.device[block * size + offset] for offset in range(size)])
        failed = []
        for row, (slot, block, tag) in enumerate(moves.loads.tolist()):
            found, held = self.tiers.get(slot, (0, []))
            for offset in range(size):
                self.device.pop(block * size + offset, None)
            if found != tag:
                failed.append(row)
            else:
                self.device |= {block * size + offset: one for offset, one in enumerate(held)}
        return failed

    def execute(self, batch: StepBatch, sequences: dict[int, Expected]) -> None:
        self._move(self.device, self.host, batch.swap_out)
        self._move(self.host, self.device, batch.swap_in)
        self._move(self.device, self.device, batch.copies)
        assert len(set(batch.row_copies[:, 1].tolist())) == len(batch.row_copies), "a row has two sources"
        self.states |= {to: self.states[of] for of, to in batch.row_copies.tolist() if of in self.states}
        written: set[int] = set()
        steps = batch.by_group()
        histories: list[list[int]] = []
        for r, seq_id in enumerate(batch.seq_ids.tolist()):
            expected = sequences[seq_id]
            drafts = drafts_of(batch, r)
            ids = self.histories(expected.device_history + drafts, expected.salt)
            histories.append(ids)
            span = slice(int(batch.query_start[r]), int(batch.query_start[r + 1]))
            positions, row = batch.positions[span].tolist(), int(batch.rows[r])
            if self.keeps_states and positions[0]:
                assert self.states[row] == ids[positions[0] - 1], f"sequence {seq_id} goes on from another's state"
            self.states[row] = ids[positions[-1]]
            assert positions == list(range(positions[0], positions[0] + len(positions)))
            assert int(batch.context_lens[r]) == positions[-1] + 1
            known = expected.history[positions[0] : positions[-1] + 1]
            if known:
                assert batch.token_ids[span].tolist() == known + drafts
            else:
                assert (batch.token_ids[span].tolist(), r < batch.num_decodes) == ([-1], True)
                assert self.last_tokens[int(batch.state_rows[r])] == expected.device_history[positions[0]]
            for group, step in enumerate(steps):
                slots = self._slots(step, r, positions)
                assert step.slot_mapping[span].tolist() == slots
                assert written.isdisjoint(slots), "two sequences or groups write one slot"
                written.update(slots)
                for position, slot in zip(positions, slots, strict=True):
                    self.device[slot] = ((group, ids[position]), self.generation)
        # In a second pass, as an attention that reads after all writes of a step would.
        for r, (seq_id, ids) in enumerate(zip(batch.seq_ids.tolist(), histories, strict=True)):
            generation = sequences[seq_id].generation
            query = int(batch.positions[batch.query_start[r]])
            for group, (step, window) in enumerate(zip(steps, self.windows, strict=True)):
                positions = range(max(query - window + 1, 0) if window else 0, int(batch.context_lens[r]))
                for position, slot in zip(positions, self._slots(step, r, positions), strict=True):
                    held, written_in = self.device[slot]
                    assert held == (group, ids[position]), (
                        f"sequence {seq_id} reads another history at position {position}"
                    )
                    assert written_in >= generation, "a cached block survived reset_prefix_cache"

    def _slots(self, step: StepBatch, r: int, positions: Iterable[int]) -> list[int]:
        """Return the slots of a sequence's positions."""
        size = self.block_size
        table = step.block_table[int(step.rows[r])].tolist()
        return [table[position // size] * size + position % size for position in positions]


def drafts_of(batch: StepBatch, row: int) -> list[int]:
    """Return the drafted tokens of a row."""
    if not len(batch.sample_tokens):
        return []
    owners = batch.sample_seq_ids[batch.sample_rows == row]
    if len(owners) < 2 or len(set(owners.tolist())) > 1:
        return []
    return batch.token_ids[batch.query_start[row] + 1 : batch.query_start[row + 1]].tolist()


@dataclass
class InFlight:
    batch: StepBatch
    tokens: list[int]
    arrays: dict[str, list[int]]
    failed_loads: list[int]


class Driver:
    """Runs a scheduler with a simulated worker and checks every step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        # Of a model with states nothing is found in a cache, and nothing swapped or drafted.
        keeps_states = not (config.enable_prefix_caching or config.num_host_blocks or config.num_speculative_tokens)
        self.worker = SimulatedWorker(config.block_size, config.group_windows, keeps_states=keeps_states)
        self.sequences: dict[int, Expected] = {}
        self.groups: dict[int, int] = {}
        self.forked: set[int] = set()
        self.sampled_groups: set[int] = set()
        self.in_flight: deque[InFlight] = deque()
        self.trace: list[Any] = []
        self.max_seqs_seen = 0
        self.num_drafted = 0

    def add(self, prompt: list[int], **options: Any) -> int:
        if options.get("beams"):
            options["max_tokens"] = min(
                options["max_tokens"] or 20, self.config.beam_tokens(options["n"]) - len(prompt)
            )
            options |= {"min_tokens": 0, "stop_token_ids": ()}
        handle = self.scheduler.add_request(prompt, **options)
        n = options.get("n", 1)
        self.groups[handle] = n
        for i in range(n):
            assert handle + i not in self.sequences
            self.sequences[handle + i] = Expected(
                prompt=list(prompt),
                max_tokens=options.get("max_tokens") or self.config.max_model_len,
                min_tokens=options.get("min_tokens", 0),
                stop_ids=set(options.get("stop_token_ids", ())),
                salt=options.get("salt", ""),
                generation=self.worker.generation,
                pooling=options.get("pooling", False),
                plan_ahead=options.get("plan_ahead", True) and not options.get("beams", False),
                beams_of=handle if options.get("beams") else None,
            )
        return handle

    def unfinished(self) -> list[int]:
        return [i for i, s in self.sequences.items() if s.reason is None]

    def sample(self, seq_id: int, drafts: list[int]) -> int:
        history = self.sequences[seq_id].device_history + drafts
        return (sum(history[-3:]) * 7 + len(history) * 3 + seq_id) % VOCABULARY

    def plan(self) -> StepBatch | None:
        """Schedule and execute a step; its results are due."""
        running = {i for i in self.unfinished() if self.scheduler.state(i) is SequenceState.RUNNING}
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.in_flight or not self.scheduler.has_unfinished(), "nothing runs although requests are left"
            return None
        self.check_rules(batch)
        if len(batch.preempted):
            assert running.issuperset(batch.seq_ids.tolist()), "a step that preempts admits nothing"
        failed_loads = self.worker.move_tiers(batch.tier_moves)
        self.worker.execute(batch, self.sequences)
        fields = ("token_ids", "positions", "slot_mapping", "rows", "seq_ids", "sample_seq_ids", "copies", "preempted")
        self.trace.append([getattr(batch, name).tolist() for name in fields])
        tokens = []
        for sample, (seq_id, row, position) in enumerate(
            zip(
                batch.sample_seq_ids.tolist(),
                batch.sample_state_rows.tolist(),
                batch.sample_positions.tolist(),
                strict=True,
            )
        ):
            sequence = self.sequences[seq_id]
            drafts = drafts_of(batch, r := int(batch.sample_rows[sample]))
            if drafts:
                place = int(batch.sampled_tokens()[sample] - batch.query_start[r])
                assert position == len(sequence.output) + place
                # What was sampled for the places before is the history of this one only where it is what was drafted.
                length = len(sequence.output)
                is_wrong = sequence.sampled[length:] != drafts[:place]
                token = self.sample(seq_id, []) if not is_wrong else 0
                tokens.append(token)
                if not is_wrong:
                    sequence.sampled.append(token)
                continue
            tokens.append(self.sample(seq_id, []))
            assert position == len(sequence.sampled)
            if sequence.beams_of is not None:
                continue
            sequence.sampled.append(tokens[-1])
            self.worker.last_tokens[row] = tokens[-1]
        others = ("block_table", "num_decodes", "more_groups", "tier_moves")
        arrays = {f.name: getattr(batch, f.name).tolist() for f in dataclasses.fields(batch) if f.name not in others}
        self.in_flight.append(InFlight(batch, tokens, arrays, failed_loads))
        return batch

    def check_rules(self, batch: StepBatch) -> None:
        config = self.config
        only_moves = (self.in_flight and len(batch.swap_out)) or (
            batch.tier_moves is not None and len(batch.tier_moves.loads)
        )
        assert (0 if only_moves else 1) <= batch.num_tokens <= config.max_num_batched_tokens
        assert batch.num_seqs <= config.max_num_seqs
        assert len(set(batch.seq_ids.tolist())) == batch.num_seqs
        assert len(set(batch.rows.tolist())) == batch.num_seqs
        lengths = np.diff(batch.query_start)
        assert int(lengths.sum()) == batch.num_tokens
        assert (lengths[: batch.num_decodes] == 1).all()
        assert (lengths > 0).all()
        if config.long_prefill_token_threshold:
            chunks = [length for r, length in enumerate(lengths.tolist()) if not drafts_of(batch, r)]
            assert max(chunks, default=0) <= config.long_prefill_token_threshold
        if batch.num_decodes:
            drafted = sum(1 + len(drafts) for r in range(batch.num_seqs) if (drafts := drafts_of(batch, r)))
            assert batch.num_tokens - batch.num_decodes - drafted <= config.mixed_prefill_budget
        assert not (len(batch.swap_out) and len(batch.swap_in))
        assert not set(batch.preempted.tolist()) & set(batch.seq_ids.tolist())
        expected_samples: list[tuple[int, int]] = []
        for r, seq_id in enumerate(batch.seq_ids.tolist()):
            sequence = self.sequences[seq_id]
            assert sequence.reason is None
            if not config.enable_chunked_prefill and not drafts_of(batch, r) and r >= batch.num_decodes:
                assert int(batch.context_lens[r]) == len(sequence.history), "a part of what there is to compute"
            if not sequence.plan_ahead and r < batch.num_decodes:
                assert all(seq_id not in step.arrays["seq_ids"] for step in self.in_flight)
            if drafts := drafts_of(batch, r):
                assert all(seq_id not in step.arrays["seq_ids"] for step in self.in_flight)
                assert int(batch.context_lens[r]) == len(sequence.history) + len(drafts)
                assert len(sequence.output) + 1 + len(drafts) <= sequence.max_tokens
                assert int(batch.context_lens[r]) < max_seq_tokens(config)
                assert len(drafts) <= config.num_speculative_tokens
                self.num_drafted += 1
                expected_samples += [(r, seq_id)] * (1 + len(drafts))
                continue
            if int(batch.context_lens[r]) < len(sequence.device_history) or sequence.pooling:
                continue
            assert len(sequence.sampled) < sequence.max_tokens, "a token is planned that is known to be one too many"
            assert len(sequence.device_history) < max_seq_tokens(config)
            n = self.groups[seq_id] if seq_id in self.groups and seq_id not in self.sampled_groups else 1
            self.sampled_groups.add(seq_id)
            expected_samples += [(r, seq_id + i) for i in range(n) if self.sequences[seq_id + i].reason is None]
        assert list(zip(batch.sample_rows.tolist(), batch.sample_seq_ids.tolist(), strict=True)) == expected_samples
        running = self.scheduler.stats.num_running
        assert running <= config.max_num_seqs
        self.max_seqs_seen = max(self.max_seqs_seen, running)

    def take_oldest(self) -> InFlight:
        step = self.in_flight.popleft()
        for name, values in step.arrays.items():
            assert getattr(step.batch, name).tolist() == values, f"{name} changed while the step was in flight"
        return step

    def finish_plan(self) -> None:
        """Give the oldest step's tokens back and check which sequences end."""
        if not self.in_flight:
            return
        step = self.take_oldest()
        batch, tokens = step.batch, step.tokens
        expected: dict[int, FinishReason] = {}
        for r, seq_id in enumerate(batch.seq_ids.tolist()):
            sequence = self.sequences[seq_id]
            if sequence.pooling and sequence.reason is None and int(batch.context_lens[r]) == len(sequence.prompt):
                expected[seq_id] = sequence.reason = FinishReason.POOLED
        wrong: set[int] = set()
        kept = []
        for sample, (seq_id, token) in enumerate(zip(batch.sample_seq_ids.tolist(), tokens, strict=True)):
            sequence = self.sequences[seq_id]
            drafts = drafts_of(batch, r := int(batch.sample_rows[sample]))
            if drafts and (seq_id in wrong or sequence.reason is not None):
                continue
            kept.append(sample)
            if sequence.reason is not None:
                continue
            place = int(batch.sampled_tokens()[sample] - batch.query_start[r])
            if drafts and drafts[place : place + 1] != [token]:
                wrong.add(seq_id)
            self.forked.update(h for h, n in self.groups.items() if h <= seq_id < h + n)
            if sequence.beams_of is not None:
                continue
            sequence.output.append(token)
            if token in sequence.stop_ids and len(sequence.output) >= sequence.min_tokens:
                sequence.reason = FinishReason.STOP
            elif len(sequence.output) >= sequence.max_tokens or len(sequence.history) >= max_seq_tokens(self.config):
                sequence.reason = FinishReason.LENGTH
            if sequence.reason is not None:
                expected[seq_id] = sequence.reason
        assert dict(self.scheduler.update(np.array(tokens, np.int64), failed_loads=step.failed_loads)) == expected
        found = self.scheduler.kept()
        assert kept == (list(range(len(tokens))) if found is None else found.tolist())
        for handle in dict.fromkeys(self.sequences[seq_id].beams_of for seq_id in batch.sample_seq_ids.tolist()):
            if handle is not None and self.scheduler.beams_sampled(handle):
                self.advance_beams(handle)

    def advance_beams(self, handle: int) -> None:
        """Let a search whose beams were all sampled go on, or end it where they are as long as they may be."""
        beams = [self.sequences[handle + i] for i in range(self.groups[handle])]
        if len(beams[0].output) + 1 >= beams[0].max_tokens:
            self.abort(handle)
            return
        before = [list(beam.output) for beam in beams]
        parents = [(sum(output) + 3 * i + len(output)) % len(beams) for i, output in enumerate(before)]
        tokens = [(7 * sum(before[parent]) + i) % VOCABULARY for i, parent in enumerate(parents)]
        self.scheduler.advance_beams(handle, parents, tokens)
        for beam, parent, token in zip(beams, parents, tokens, strict=True):
            beam.output, beam.sampled = [*before[parent], token], [*before[parent], token]

    def step(self) -> bool:
        """Plan as many steps as may be in flight, and book the oldest."""
        while len(self.in_flight) <= self.config.steps_in_flight and self.plan() is not None:
            self.scheduler.check()
        if not self.in_flight:
            return False
        self.finish_plan()
        self.scheduler.check()
        return True

    def fail(self) -> None:
        batch = self.take_oldest().batch
        affected = {
            seq_id + i
            for seq_id in batch.seq_ids.tolist()
            for i in range(self.groups[seq_id] if seq_id in self.groups and seq_id not in self.forked else 1)
            if self.sequences[seq_id + i].reason is None
        }
        assert dict(self.scheduler.fail_step()) == dict.fromkeys(affected, FinishReason.ERROR)
        for seq_id in affected:
            self.sequences[seq_id].reason = FinishReason.ERROR
        # A search goes on with all of its beams or ends.
        for handle in {self.sequences[seq_id].beams_of for seq_id in affected} - {None}:
            self.abort(handle)

    def abort(self, handle: int) -> None:
        self.scheduler.abort([handle])
        for seq_id in range(handle, handle + self.groups[handle]):
            if self.sequences[seq_id].reason is None:
                self.sequences[seq_id].reason = FinishReason.ABORT

    def run_to_the_end(self, max_steps: int = 20_000) -> int:
        steps = 0
        while self.step():
            steps += 1
            assert steps <= max_steps, "requests starve"
        for seq_id, sequence in self.sequences.items():
            assert sequence.reason is not None
            assert self.scheduler.finish_reason(seq_id) == sequence.reason
            assert self.scheduler.state(seq_id) is SequenceState.FINISHED
            assert self.scheduler.output_token_ids(seq_id).tolist() == sequence.output
        stats = self.scheduler.block_stats
        assert (stats.device_used, stats.host_used) == (0, 0)
        assert stats.device_free == self.config.num_device_blocks
        return steps

    def outputs(self) -> list[tuple[list[int], FinishReason | None]]:
        return [(s.output, s.reason) for _, s in sorted(self.sequences.items())]


def drafting(num_tokens: int) -> dict[str, int]:
    """Settings with prompt lookup, of which a small vocabulary makes much use."""
    return {
        "num_lookahead_slots": num_tokens,
        "num_speculative_tokens": num_tokens,
        "num_draft_slots": 2 * num_tokens,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "vocab_size": VOCABULARY,
    }


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    max_num_seqs = draw(st.integers(1, 6))
    chunked = draw(st.booleans())
    max_model_len = draw(st.integers(6, 40))
    windows = draw(st.sampled_from([(0,), (0,), (0, 5), (0, 3, 3), (6,), (9, 2)]))
    caches = draw(st.booleans())
    tiers = draw(st.sampled_from([(0, 0), (2, 0), (3, 2), (9, 4)])) if caches and windows == (0,) else (0, 0)
    return SchedulerConfig(
        block_size=block_size,
        num_device_blocks=len(windows) * draw(st.integers(2, 16)),
        num_host_blocks=draw(st.sampled_from([0, 3, 20])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 24)) if chunked else max(max_model_len, max_num_seqs),
        max_model_len=max_model_len,
        num_tier_host_blocks=tiers[0],
        num_tier_disk_blocks=tiers[1],
        enable_prefix_caching=caches,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])) if chunked else 0,
        mixed_prefill_tokens=draw(st.sampled_from([None, 1, 4])) if chunked else None,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
        preemption_mode=draw(st.sampled_from(["auto", "swap", "recompute"])),
        swap_seconds_per_block=1.0,
        recompute_seconds_per_token=draw(st.sampled_from([0.1, 1.0])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        **draw(st.sampled_from([{}, {"num_lookahead_slots": 3}, drafting(1), drafting(3)])),
        steps_in_flight=draw(st.sampled_from([0, 1, 2])),
        starvation_limit=draw(st.sampled_from([1, 2, 8])),
        hash_bits=draw(st.sampled_from([0, 3, 64])),
        group_windows=windows,
    )


PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    st.integers(1, 30).map(lambda n: [1, 2, 3, 4] * (n // 4) + [1] * (n % 4 + 1)),
)


@st.composite
def request_options(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 20), st.integers(8, 20)))
    return {
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens or 5)),
        "stop_token_ids": draw(st.sampled_from([[], [], [2], [0, 1, 2, 3, 7, 9]])),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from(["", "", "a"])),
        "max_cached_tokens": draw(st.sampled_from([None, None, 0, 1, 7, 30])),
        "plan_ahead": draw(st.sampled_from([True, True, False])),
        "beams": (beams := draw(st.sampled_from([False, False, True]))),
        "drafts": not beams and draw(st.booleans()),
    }


class SchedulerMachine(RuleBasedStateMachine):
    driver: Driver | None = None

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.released: set[int] = set()

    def is_idle(self) -> bool:
        return self.driver is not None and not self.driver.in_flight

    def may_plan(self) -> bool:
        return self.driver is not None and len(self.driver.in_flight) <= self.driver.config.steps_in_flight

    @rule(prompt=PROMPTS, options=request_options())
    def add(self, prompt: list[int], options: dict[str, Any]) -> None:
        assert self.driver
        config = self.driver.config
        options["n"] = min(options["n"], config.max_num_seqs)
        limit = config.beam_tokens(options["n"]) if options["beams"] else max_seq_tokens(config)
        if limit < 2:
            options["beams"], limit = False, max_seq_tokens(config)
        self.driver.add(prompt[: limit - 1], **options)

    @rule(prompt=PROMPTS)
    def add_pooling(self, prompt: list[int]) -> None:
        assert self.driver
        self.driver.add(prompt[: max_seq_tokens(self.driver.config)], pooling=True)

    @rule(times=st.integers(1, 15))
    def step(self, times: int) -> None:
        assert self.driver
        for _ in range(times):
            self.driver.step()

    @precondition(may_plan)
    @rule()
    def plan(self) -> None:
        assert self.driver
        self.driver.plan()

    @precondition(lambda self: self.driver is not None and self.driver.in_flight)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def finish_plan(self, fails: bool) -> None:
        assert self.driver
        if fails:
            self.driver.fail()
        else:
            self.driver.finish_plan()

    @precondition(lambda self: self.driver is not None and self.driver.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.driver
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.groups))))

    def may_finish(self) -> list[int]:
        sequences = self.driver.sequences if self.driver is not None else {}
        return [i for i, s in sequences.items() if s.output and s.beams_of is None]

    @precondition(may_finish)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        assert self.driver
        seq_id = data.draw(st.sampled_from(self.may_finish()))
        sequence = self.driver.sequences[seq_id]
        assert self.driver.scheduler.finish(seq_id) is (sequence.reason is None)
        sequence.reason = sequence.reason or FinishReason.STOP

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.driver
        self.driver.scheduler.reset_prefix_cache()
        if not self.driver.in_flight:
            self.driver.worker.generation += 1

    @precondition(is_idle)
    @rule(swapped=st.booleans())
    def lose_kv_blocks(self, swapped: bool) -> None:
        assert self.driver
        self.driver.scheduler.recompute_all(swapped=swapped)
        self.driver.worker.device.clear()
        if swapped:
            self.driver.worker.host.clear()
            # As after a change of weights: what is there is not what anything would compute now.
            self.driver.worker.tiers = {
                slot: (tag, [((0, -1), 0)] * len(held)) for slot, (tag, held) in self.driver.worker.tiers.items()
            }
        assert self.driver.scheduler.live_blocks(running=True).tolist() == []

    @precondition(is_idle)
    @rule()
    def store_cached(self) -> None:
        assert self.driver
        batch = self.driver.scheduler.store_cached()
        if batch is not None:
            assert batch.num_tokens == 0
            assert self.driver.worker.move_tiers(batch.tier_moves) == []
            assert self.driver.scheduler.update(np.empty(0, np.int64)) == []

    @rule(data=st.data())
    def lose_a_block_of_the_tiers(self, data: st.DataObject) -> None:
        tiers = self.driver.worker.tiers if self.driver is not None else {}
        if tiers:
            slot = data.draw(st.sampled_from(sorted(tiers)))
            tag, _ = tiers.pop(slot)
            if data.draw(st.booleans()):
                self.driver.scheduler.drop_stored([(slot, tag)])

    @precondition(is_idle)
    @rule()
    def lose_blocks_that_do_not_count(self) -> None:
        assert self.driver
        worker, size = self.driver.worker, self.driver.config.block_size
        live = set(self.driver.scheduler.live_blocks(running=True).tolist())
        worker.device = {slot: held for slot, held in worker.device.items() if slot // size in live}

    @rule()
    def release(self) -> None:
        assert self.driver
        ended = [i for i, s in self.driver.sequences.items() if s.reason is not None and i not in self.released]
        for seq_id in ended:
            assert self.driver.scheduler.output_token_ids(seq_id).tolist() == self.driver.sequences[seq_id].output
        self.driver.scheduler.release(ended)
        self.released.update(ended)
        for seq_id in ended:
            with pytest.raises(KeyError):
                self.driver.scheduler.state(seq_id)

    @invariant()
    def invariants_hold(self) -> None:
        if self.driver is not None:
            self.driver.scheduler.check()

    def teardown(self) -> None:
        if self.driver is None:
            return
        while self.driver.in_flight:
            self.driver.finish_plan()
        for seq_id in self.released:
            del self.driver.sequences[seq_id]
        self.driver.run_to_the_end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def random_load(driver: Driver, seed: int, num_requests: int = 25) -> Driver:
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCABULARY) for _ in range(12)]
    left = num_requests
    for _ in range(5000):
        while left and rng.random() < 0.5:
            left -= 1
            prompt = prefix[: rng.randrange(13)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 10))]
            driver.add(
                prompt,
                n=rng.choice([1, 1, 1, 2, 3]),
                max_tokens=rng.randrange(1, 15),
                priority=rng.randrange(3),
                min_tokens=rng.randrange(2),
                stop_token_ids=rng.choice([[], [3]]),
                plan_ahead=rng.random() < 0.8,
                drafts=True,
            )
        if not driver.step() and not left:
            break
    driver.run_to_the_end()
    return driver


LOAD = SchedulerConfig(
    block_size=4,
    num_device_blocks=200,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    max_model_len=48,
    swap_seconds_per_block=1.0,
    recompute_seconds_per_token=1.0,
)


def variant(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{**LOAD.__dict__, **changes})


@cache
def usual_outputs(seed: int) -> list[tuple[list[int], FinishReason | None]]:
    """Return what a load gives with the usual settings."""
    return random_load(Driver(LOAD), seed).outputs()


TIGHT = {"num_device_blocks": 12, "max_num_seqs": 6}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config",
    [
        variant(enable_prefix_caching=False),
        variant(block_size=1),
        variant(block_size=16),
        variant(max_num_seqs=3, max_num_batched_tokens=3),
        variant(long_prefill_token_threshold=2),
        variant(mixed_prefill_tokens=3, steps_in_flight=1),
        variant(enable_chunked_prefill=False),
        variant(scheduling_policy="priority"),
        variant(num_lookahead_slots=5),
        *[variant(steps_in_flight=depth) for depth in (1, 2)],
        *[variant(**TIGHT, steps_in_flight=depth, preemption_mode="recompute") for depth in (1, 2)],
        *[variant(**TIGHT, steps_in_flight=depth, preemption_mode="swap", num_host_blocks=100) for depth in (1, 2)],
        *[variant(**TIGHT, steps_in_flight=depth, scheduling_policy="priority", num_host_blocks=8) for depth in (1, 2)],
        *[variant(**drafting(4), steps_in_flight=depth) for depth in (0, 1)],
        variant(**TIGHT, **drafting(3), preemption_mode="recompute", steps_in_flight=1),
        variant(**TIGHT, **drafting(3), preemption_mode="swap", num_host_blocks=100),
        variant(**drafting(2), group_windows=(0, 6), num_device_blocks=24, num_host_blocks=100),
        variant(**TIGHT, preemption_mode="recompute"),
        variant(**TIGHT, preemption_mode="swap", num_host_blocks=100),
        variant(**TIGHT, preemption_mode="auto", num_host_blocks=8),
        variant(**TIGHT, scheduling_policy="priority", num_host_blocks=8, watermark=0.0),
        *[variant(group_windows=windows, steps_in_flight=1) for windows in ((0, 6), (0, 6, 6, 6), (10,), (10, 6))],
        *[
            variant(
                group_windows=windows,
                num_device_blocks=24,
                max_num_seqs=6,
                steps_in_flight=depth,
                preemption_mode=mode,
                num_host_blocks=100,
            )
            for windows in ((0, 6), (10,))
            for depth, mode in ((0, "swap"), (2, "swap"), (1, "recompute"))
        ],
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in c.__dict__.items() if LOAD.__dict__[k] != v),
)
def test_tokens_do_not_depend_on_the_settings(config: SchedulerConfig, seed: int) -> None:
    assert random_load(Driver(config), seed).outputs() == usual_outputs(seed)


class Copying(Driver):
    """A model that copies its prompt again and again, with another token in each eleventh place."""

    def sample(self, seq_id: int, drafts: list[int]) -> int:
        history = self.sequences[seq_id].device_history + drafts
        return 0 if len(history) % 11 == 0 else history[-6]


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_drafts_that_are_right_save_steps(steps_in_flight: int) -> None:
    def run(**settings: Any) -> tuple[int, Driver]:
        driver = Copying(variant(**settings, steps_in_flight=steps_in_flight))
        for number in range(3):
            driver.add([number, 1, 2, 3, 4, 3], max_tokens=40, drafts=True)
        return driver.run_to_the_end(), driver

    steps, without = run()
    fewer, driver = run(**drafting(4))
    assert driver.outputs() == without.outputs()
    stats = driver.scheduler.draft_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_at)
    assert stats.num_drafts == driver.num_drafted
    assert fewer < 0.9 * steps


def test_drafts_cost_rows_and_are_made_where_they_pay() -> None:
    def num_drafts(fixed: float, per_token: float) -> int:
        driver = Copying(variant(**drafting(4)))
        driver.scheduler.set_step_cost(fixed, per_token)
        driver.add([0, 1, 2, 3, 4, 3], max_tokens=40, drafts=True)
        driver.run_to_the_end()
        return driver.scheduler.draft_stats.num_draft_tokens

    free, cheap, dear = num_drafts(0, 0), num_drafts(1.0, 0.2), num_drafts(0.0, 1.0)
    assert free >= cheap > dear == 0


@pytest.mark.parametrize(
    ("mode", "host", "counter"),
    [("recompute", 0, "preemptions_by_recompute"), ("swap", 100, "preemptions_by_swap")],
)
def test_a_tiny_pool_forces_preemption_of_the_wanted_kind(mode: Any, host: int, counter: str) -> None:
    driver = random_load(Driver(variant(**TIGHT, preemption_mode=mode, num_host_blocks=host)), seed=1)
    assert getattr(driver.scheduler.stats, counter) > 3


@pytest.mark.parametrize("keeps_states", [False, True])
@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_beams_in_a_tiny_pool_are_preempted_together_and_go_on(steps_in_flight: int, keeps_states: bool) -> None:
    more: dict[str, Any] = {"preemption_mode": "swap", "num_host_blocks": 100}
    if keeps_states:
        more = {"enable_prefix_caching": False}
    driver = Driver(variant(**TIGHT, steps_in_flight=steps_in_flight, **more))
    for number in range(6):
        driver.add([1, 2, number % 5, 4], n=2 + number % 2, max_tokens=12, beams=True)
        driver.add([number % 5] * 5, n=2, max_tokens=14)
    driver.run_to_the_end()
    assert driver.scheduler.stats.preemptions_by_recompute >= 2
    assert {len(s.output) for s in driver.sequences.values() if s.beams_of is not None} == {11}


def test_a_beam_whose_sample_is_in_flight_at_its_preemption_is_not_sampled_twice() -> None:
    """One beam is sampled and another in flight when both are preempted: computed again they would be told apart by that."""
    sizes = {
        "block_size": 4,
        "num_device_blocks": 6,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "max_model_len": 10,
    }
    driver = Driver(
        SchedulerConfig(
            **sizes, enable_prefix_caching=False, watermark=0.0, preemption_mode="recompute", steps_in_flight=1
        )
    )
    driver.add([1] * 5, max_tokens=9)
    driver.add([1], max_tokens=9)
    driver.add([0, 1, 2], n=2, max_tokens=None, beams=True)
    driver.add([1] * 5, max_tokens=6)
    driver.run_to_the_end()
    assert driver.scheduler.stats.preemptions_by_recompute >= 2


def test_beams_that_later_requests_pass_over_are_boosted_together() -> None:
    """Only the first has waited before the prompt was computed. Boosted alone, it would not be preempted with the others."""
    sizes = {"num_device_blocks": 6, "max_num_seqs": 3, "max_model_len": 16, "watermark": 0.0}
    driver = Driver(variant(**sizes, enable_prefix_caching=False, scheduling_policy="priority", starvation_limit=2))
    driver.add([1, 2, 3, 4], n=2, max_tokens=8, priority=1, beams=True)
    for _ in range(2):
        driver.add([5] * 4, n=2, max_tokens=1, priority=0)
        driver.step()
        driver.step()
        driver.scheduler.recompute_all(swapped=False)
    driver.add([6] * 4, max_tokens=12, priority=0)
    driver.run_to_the_end()
    assert driver.scheduler.stats.preemptions_by_recompute > 0


def test_beams_are_computed_whole_where_prompts_are() -> None:
    driver = Driver(variant(enable_chunked_prefill=False, max_num_seqs=2, max_num_batched_tokens=48))
    driver.add([1] * 10, max_tokens=4)
    driver.add([2] * 40, n=1, max_tokens=4, beams=True)
    driver.run_to_the_end()


def test_a_sequence_that_is_computed_again_whole_is_not_starved_by_new_ones() -> None:
    """The second beam needs most of a step, of which the guesses of those that decode beside it may leave too little."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 32, "num_device_blocks": 400}
    for seed in range(40):
        rng = random.Random(seed)
        driver = Driver(variant(**sizes, enable_chunked_prefill=False, enable_prefix_caching=False, **drafting(3)))
        handle = driver.add([2] * 26, n=2, max_tokens=4, beams=True)
        driver.step()
        driver.scheduler.recompute_all(swapped=False)
        steps = 0
        while driver.sequences[handle].reason is None:
            for _ in range(2):
                driver.add([rng.randrange(VOCABULARY)] * rng.randint(1, 3), max_tokens=12, drafts=True)
            driver.step()
            steps += 1
            assert steps < 60, seed


@given(seed=st.integers(0, 1 << 30), config=configs())
@settings(max_examples=30, deadline=None)
def test_equal_calls_give_equal_steps(seed: int, config: SchedulerConfig) -> None:
    def run() -> list[Any]:
        rng = random.Random(seed)
        driver = Driver(config)
        actions: list[Callable[[], Any]] = [
            lambda: driver.add(
                [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, max_seq_tokens(config)))],
                n=rng.randrange(1, min(3, config.max_num_seqs) + 1),
                max_tokens=rng.randrange(1, 12),
                priority=rng.randrange(3),
            ),
            lambda: driver.abort(rng.choice(sorted(driver.groups))) if driver.groups else None,
            driver.step,
            driver.step,
            driver.step,
        ]
        for _ in range(40):
            rng.choice(actions)()
        driver.run_to_the_end()
        return driver.trace

    assert run() == run()


def test_no_sample_counts_of_a_step_whose_only_sequence_had_drafts_and_has_ended() -> None:
    scheduler = Scheduler(variant(**drafting(2)))
    handle = scheduler.add_request([1, 2, 1, 2, 1], max_tokens=20, drafts=True)
    scheduler.schedule()
    scheduler.update(np.array([2], np.int64))
    batch = scheduler.schedule()
    assert batch is not None
    assert len(batch.sample_rows) > 1
    scheduler.finish(handle)
    assert scheduler.update(np.ones(len(batch.sample_rows), np.int64)) == []
    kept = scheduler.kept()
    assert kept is not None
    assert len(kept) == 0


def test_a_model_makes_drafts_while_it_is_mostly_right_and_is_asked_again_later() -> None:
    """The worker guesses right until a place of the text, and wrong from there on."""
    room = {"max_model_len": 512, "num_device_blocks": 512, "drafts_by_model": True}
    scheduler = Scheduler(variant(**drafting(4) | room))
    scheduler.set_step_cost(1.0, 0.4)
    scheduler.add_request([1, 2, 3], max_tokens=400, drafts=True)
    tokens, rows = [], []
    while (batch := scheduler.schedule()) is not None:
        count = len(batch.sample_rows)
        assert batch.token_ids.tolist()[-count:].count(-1) == count - 1
        sampled = np.arange(len(tokens), len(tokens) + count) % VOCABULARY
        drafted = np.append(sampled[:-1] + (len(tokens) > 200), -1).astype(np.int64)
        if count > 1:
            with pytest.raises(InvalidRequest, match="a model makes the step's drafts"):
                scheduler.update(sampled)
        scheduler.update(sampled, drafted)
        kept = scheduler.kept()
        tokens += sampled[slice(None) if kept is None else kept].tolist()
        rows.append((len(tokens), count))
    assert tokens == [number % VOCABULARY for number in range(400)]
    assert all(count == 5 for done, count in rows if 20 < done < 190)
    later = [count for done, count in rows if done > 250]
    assert set(later) == {1, 2}
    assert 2 <= later.count(2) <= 6
