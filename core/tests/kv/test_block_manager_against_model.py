"""The block manager does what a plain Python model of it says, and every sequence always finds its own keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardpoint.kv import AllocStatus, BlockManager

MAX_SEQS = 6


@dataclass(eq=False)
class Block:
    refs: int = 1
    key: tuple[str, tuple[int, ...]] | None = None


@dataclass
class Sequence:
    tokens: list[int]
    salt: str
    generation: int
    blocks: list[Block]
    registered: int = 0
    computed: int = 0
    shares_tail: bool = False
    host: list[Block] | None = None


@dataclass
class Model:
    block_size: int
    num_device: int
    num_host: int
    watermark: int
    caching: bool
    cache: dict[Any, Block] = field(default_factory=dict)
    lru: list[Block] = field(default_factory=list)
    seqs: dict[int, Sequence] = field(default_factory=dict)
    spare: int = 0
    host_free: int = 0
    generation: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self.spare, self.host_free = self.num_device, self.num_host

    @property
    def free(self) -> int:
        return self.spare + len(self.lru)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self) -> Block:
        if self.spare:
            self.spare -= 1
        else:
            del self.cache[self.lru.pop(0).key]
            self.evictions += 1
        return Block()

    def add_ref(self, block: Block) -> None:
        if block.refs == 0:
            self.lru.remove(block)
        block.refs += 1

    def drop_ref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            if block.key is None:
                self.spare += 1
            else:
                self.lru.append(block)

    def key(self, tokens: list[int], salt: str, index: int) -> tuple[str, tuple[int, ...]]:
        return salt, tuple(tokens[: (index + 1) * self.block_size])

    def match(self, tokens: list[int], salt: str, use_cache: bool) -> list[Block]:
        hits: list[Block] = []
        if use_cache and self.caching:
            while len(hits) < (len(tokens) - 1) // self.block_size:
                block = self.cache.get(self.key(tokens, salt, len(hits)))
                if block is None:
                    break
                hits.append(block)
        return hits

    def status(self, needed: int) -> AllocStatus:
        if needed > self.num_device:
            return AllocStatus.NEVER
        kept = 0 if self.free == self.num_device else self.watermark
        return AllocStatus.OK if self.free - needed >= kept else AllocStatus.LATER

    def can_allocate(self, tokens: list[int], salt: str, use_cache: bool, lookahead: int) -> AllocStatus:
        hits = self.match(tokens, salt, use_cache)
        total = self.blocks_for(len(tokens) + lookahead)
        if total > self.num_device:
            return AllocStatus.NEVER
        return self.status(total - len(hits) + sum(b.refs == 0 for b in hits))

    def allocate(self, seq_id: int, tokens: list[int], salt: str, use_cache: bool, lookahead: int) -> int:
        hits = self.match(tokens, salt, use_cache)
        for block in hits:
            self.add_ref(block)
        total = self.blocks_for(len(tokens) + lookahead)
        blocks = hits + [self.take() for _ in range(total - len(hits))]
        cached = len(hits) * self.block_size
        self.seqs[seq_id] = Sequence(list(tokens), salt, self.generation, blocks, len(hits), cached)
        return cached

    def copies_tail(self, seq: Sequence) -> bool:
        position = len(seq.tokens)
        index = position // self.block_size
        return (
            seq.shares_tail
            and position % self.block_size != 0
            and index < len(seq.blocks)
            and seq.blocks[index].refs > 1
        )

    def num_new(self, seq: Sequence, count: int, lookahead: int) -> int:
        total = self.blocks_for(len(seq.tokens) + count + lookahead)
        return max(0, total - len(seq.blocks)) + self.copies_tail(seq)

    def append(self, seq: Sequence, tokens: list[int], lookahead: int) -> int:
        copied = self.copies_tail(seq)
        if copied:
            index = len(seq.tokens) // self.block_size
            old = seq.blocks[index]
            seq.blocks[index] = self.take()
            self.drop_ref(old)
        seq.shares_tail = False
        total = self.blocks_for(len(seq.tokens) + len(tokens) + lookahead)
        while len(seq.blocks) < total:
            seq.blocks.append(self.take())
        seq.tokens += tokens
        return copied

    def mark_computed(self, seq: Sequence, computed: int) -> None:
        seq.computed = computed
        if not self.caching or seq.generation != self.generation:
            return
        while seq.registered < computed // self.block_size:
            key, own = self.key(seq.tokens, seq.salt, seq.registered), seq.blocks[seq.registered]
            cached = self.cache.setdefault(key, own)
            if cached is own:
                own.key = key
            else:
                self.add_ref(cached)
                self.drop_ref(own)
                seq.blocks[seq.registered] = cached
            seq.registered += 1

    def fork(self, parent: Sequence, child: int) -> None:
        shared = parent.blocks[: self.blocks_for(parent.computed)]
        for block in shared:
            self.add_ref(block)
        parent.shares_tail = True
        self.seqs[child] = Sequence(
            list(parent.tokens), parent.salt, parent.generation, shared, parent.registered, parent.computed, True
        )

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.blocks):
            self.drop_ref(block)
        seq.blocks, seq.registered, seq.shares_tail = [], 0, False

    def release_host(self, seq: Sequence) -> None:
        for block in seq.host or []:
            block.refs -= 1
            self.host_free += block.refs == 0

    def host_blocks_of(self, seqs: list[Sequence]) -> set[Block]:
        return {b for s in seqs for b in s.blocks[: self.blocks_for(s.computed)]}

    def can_swap_out(self, seqs: list[Sequence]) -> AllocStatus:
        needed = len(self.host_blocks_of(seqs))
        if needed > self.num_host:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed <= self.host_free else AllocStatus.LATER

    def swap_out(self, seqs: list[Sequence]) -> None:
        host = {device: Block(refs=0) for device in self.host_blocks_of(seqs)}
        self.host_free -= len(host)
        for seq in seqs:
            seq.host = [host[b] for b in seq.blocks[: self.blocks_for(seq.computed)]]
            for block in seq.host:
                block.refs += 1
        for seq in seqs:
            self.release(seq)

    def swap_in_needs(self, seqs: list[Sequence]) -> int:
        distinct = {b for s in seqs for b in s.host or []}
        return len(distinct) + sum(self.blocks_for(len(s.tokens)) - len(s.host or []) for s in seqs)

    def swap_in(self, seqs: list[Sequence]) -> None:
        device: dict[Block, Block] = {}
        for seq in seqs:
            for host in seq.host or []:
                if host in device:
                    self.add_ref(device[host])
                else:
                    device[host] = self.take()
                seq.blocks.append(device[host])
            while len(seq.blocks) < self.blocks_for(len(seq.tokens)):
                seq.blocks.append(self.take())
            seq.shares_tail = len(seqs) > 1
        for seq in seqs:
            self.release_host(seq)
            seq.host = None

    def reset(self) -> None:
        if not self.caching:
            return
        for block in self.cache.values():
            block.key = None
        self.cache.clear()
        self.spare += len(self.lru)
        self.lru.clear()
        self.generation += 1


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_device=st.integers(1, 14),
        num_host=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        caching=st.booleans(),
        hash_bits=st.sampled_from([0, 1, 3, 64]),
    )
    def start(
        self, block_size: int, num_device: int, num_host: int, watermark: float, caching: bool, hash_bits: int
    ) -> None:
        self.manager = BlockManager(
            block_size=block_size,
            num_device_blocks=num_device,
            num_host_blocks=num_host,
            watermark=watermark,
            enable_prefix_caching=caching,
            hash_bits=hash_bits,
        )
        self.model = Model(block_size, num_device, num_host, self.manager.watermark_blocks, caching)
        self.kv: dict[tuple[str, int, int], Any] = {}

    def resident(self) -> list[int]:
        return [i for i, s in self.model.seqs.items() if s.host is None]

    def swapped(self) -> list[int]:
        return [i for i, s in self.model.seqs.items() if s.host is not None]

    def free_id(self) -> int:
        return next(i for i in range(MAX_SEQS + 1) if i not in self.model.seqs)

    def move(self, source: str, target: str, pairs: list[tuple[int, int]]) -> None:
        snapshot = dict(self.kv)
        for a, b in pairs:
            for offset in range(self.model.block_size):
                self.kv[target, b, offset] = snapshot.get((source, a, offset))

    def compute(self, seq_id: int, upto: int) -> None:
        seq, size = self.model.seqs[seq_id], self.model.block_size
        table = self.manager.block_table(seq_id)
        for position in range(seq.computed, upto):
            value = (self.model.generation, seq.salt, tuple(seq.tokens[: position + 1]))
            self.kv["device", table[position // size], position % size] = value

    @precondition(lambda self: len(self.model.seqs) < MAX_SEQS)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        salt=st.sampled_from(["", "", "a"]),
        use_cache=st.sampled_from([True, True, False]),
        lookahead=st.sampled_from([0, 0, 3]),
    )
    def allocate(self, tokens: list[int], salt: str, use_cache: bool, lookahead: int) -> None:
        expected = self.model.can_allocate(tokens, salt, use_cache, lookahead)
        arguments: dict[str, Any] = {"salt": salt, "use_prefix_cache": use_cache, "lookahead": lookahead}
        assert self.manager.can_allocate(tokens, **arguments) is expected
        if expected is AllocStatus.OK:
            seq_id = self.free_id()
            cached = self.model.allocate(seq_id, tokens, salt, use_cache, lookahead)
            assert self.manager.allocate(seq_id, tokens, **arguments) == cached
            assert cached < len(tokens)

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), all_at_once=st.booleans())
    def compute_tokens(self, data: st.DataObject, all_at_once: bool) -> None:
        seq_id = data.draw(st.sampled_from(self.resident()))
        seq = self.model.seqs[seq_id]
        upto = len(seq.tokens) if all_at_once else data.draw(st.integers(seq.computed, len(seq.tokens)))
        self.compute(seq_id, upto)
        self.model.mark_computed(seq, upto)
        self.manager.mark_computed(seq_id, upto)

    @precondition(lambda self: self.resident())
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        lookahead=st.sampled_from([0, 0, 2]),
    )
    def append(self, data: st.DataObject, tokens: list[int], lookahead: int) -> None:
        seq_id = data.draw(st.sampled_from(self.resident()))
        seq = self.model.seqs[seq_id]
        needed = self.model.num_new(seq, len(tokens), lookahead)
        assert self.manager.num_new_blocks(seq_id, len(tokens), lookahead) == needed
        status = self.manager.can_append(seq_id, len(tokens), lookahead)
        if self.model.blocks_for(len(seq.tokens) + len(tokens) + lookahead) > self.model.num_device:
            assert status is AllocStatus.NEVER
        elif needed > self.model.free:
            assert status is AllocStatus.LATER
        else:
            assert status is AllocStatus.OK
            copies = self.manager.append_slots(seq_id, tokens, lookahead)
            assert len(copies) == self.model.append(seq, tokens, lookahead)
            self.move("device", "device", copies)

    @precondition(lambda self: self.resident() and len(self.model.seqs) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.resident()))
        seq = self.model.seqs[parent]
        self.compute(parent, len(seq.tokens))
        self.model.mark_computed(seq, len(seq.tokens))
        self.manager.mark_computed(parent, len(seq.tokens))
        child = self.free_id()
        self.model.fork(seq, child)
        self.manager.fork(parent, child)

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.model.seqs)))
        seq = self.model.seqs.pop(seq_id)
        if seq.host is None:
            self.model.release(seq)
        else:
            self.model.release_host(seq)
        self.manager.free(seq_id)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.resident()), min_size=1, max_size=3, unique=True))
        seqs = [self.model.seqs[i] for i in ids]
        expected = self.model.can_swap_out(seqs)
        assert self.manager.can_swap_out(ids) is expected
        if expected is AllocStatus.OK:
            self.model.swap_out(seqs)
            self.move("device", "host", self.manager.swap_out(ids))

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.swapped()), min_size=1, max_size=3, unique=True))
        seqs = [self.model.seqs[i] for i in ids]
        expected = self.model.status(self.model.swap_in_needs(seqs))
        assert self.manager.can_swap_in(ids) is expected
        if expected is AllocStatus.OK:
            self.model.swap_in(seqs)
            self.move("host", "device", self.manager.swap_in(ids))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.model.reset()
        self.manager.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        stats = self.manager.stats
        assert stats.device_free == self.model.free
        assert stats.device_used == self.model.num_device - self.model.free
        assert stats.host_free == self.model.host_free
        assert stats.cached == len(self.model.cache)
        assert stats.evictions == self.model.evictions
        for seq_id, seq in self.model.seqs.items():
            if seq.host is None:
                refs = [self.manager.ref_count(b) for b in self.manager.block_table(seq_id)]
                assert refs == [b.refs for b in seq.blocks]

    @invariant()
    def every_sequence_finds_its_own_keys_and_values(self) -> None:
        if not hasattr(self, "manager"):
            return
        size = self.model.block_size
        for seq_id, seq in self.model.seqs.items():
            pool = "device" if seq.host is None else "host"
            table = self.manager.block_table(seq_id)
            for position in range(seq.computed):
                found = self.kv[pool, table[position // size], position % size]
                assert found[1:] == (seq.salt, tuple(seq.tokens[: position + 1]))
                assert found[0] >= seq.generation, "a cached block survived reset_prefix_cache"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq_id in list(self.model.seqs):
            self.manager.free(seq_id)
        stats = self.manager.stats
        assert (stats.device_used, stats.host_used) == (0, 0)
        self.manager.check()


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
