"""The fused decoder against a plain float64 implementation, for the families that it covers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import (
    KV_CACHE,
    Activation,
    AdapterRows,
    AdapterWeights,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    DType,
    FuseRequest,
    KVCacheGroup,
    StepBatch,
)
from hardpoint.sampling import ranking
from hardpoint_cpu import _native
from hardpoint_cpu.allocator import CpuAllocator
from hardpoint_cpu.attention import CpuAttention
from hardpoint_cpu.decoder import CpuDecoder, DecoderSpec, InvalidOperand, RopeTables, refusals
from hardpoint_cpu.descriptor import hardpoint_backend

MAX_CONTEXT = 96
BLOCK_SIZE = 8
VOCAB = 99
LAYER = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)

LLAMA = DecoderSpec(
    vocab_size=VOCAB,
    hidden_size=40,
    intermediate_size=56,
    attention=(LAYER,) * 3,
    rope_tables=(0,) * 3,
    rotary_dim=16,
    norm_eps=1e-5,
    tied=True,
)
QWEN2 = replace(LLAMA, qkv_bias=True, tied=False)
QWEN3 = replace(LLAMA, qk_norm=True)
PARTIAL_ROTARY = replace(LLAMA, rotary_dim=8, o_bias=True)
ODD_SIZES = replace(LLAMA, hidden_size=33, intermediate_size=41)
GEMMA2 = replace(
    LLAMA,
    attention=(replace(LAYER, sliding_window=5, soft_cap=20.0), replace(LAYER, soft_cap=20.0)) * 2,
    rope_tables=(0, 1, 0, 1),
    activation=Activation.GELU_TANH,
    sandwich_norms=True,
    embed_scale=40**0.5,
    logit_soft_cap=5.0,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "partial-rotary": PARTIAL_ROTARY,
    "odd-sizes": ODD_SIZES,
    "gemma2": GEMMA2,
}


@pytest.fixture(autouse=True)
def _restore_native_settings() -> Iterator[None]:
    isa, threads = _native.isa(), _native.num_threads()
    yield
    _native.set_isa(isa)
    _native.set_num_threads(threads)


def rotary_tables(spec: DecoderSpec) -> tuple[tuple[Tensor, Tensor], ...]:
    positions = torch.arange(MAX_CONTEXT, dtype=torch.float64)[:, None]
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    angles = [positions * base**-exponents for base in (100.0, 1000.0)[: max(spec.rope_tables) + 1]]
    return tuple((angle.cos().float(), angle.sin().float()) for angle in angles)


def random_weights(spec: DecoderSpec, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        values = torch.randn(shape, generator=generator)
        is_norm = name.endswith("norm")
        scaled = 1 + 0.1 * values if is_norm else values * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
        weights[name] = scaled if len(shape) == 1 else scaled.to(dtype)
    return weights


def reference_logits(spec: DecoderSpec, weights: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 logits and final hidden states of all positions of one sequence."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    tables = [(cos.double(), sin.double()) for cos, sin in rotary_tables(spec)]
    n = len(tokens)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps) * weight

    def rotate(x: Tensor, table: int) -> Tensor:
        cos, sin = (part[:n, None] for part in tables[table])
        half = spec.rotary_dim // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def cap(x: Tensor, limit: float | None) -> Tensor:
        return x if limit is None else limit * torch.tanh(x / limit)

    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    x = w["embed"][tokens] * spec.embed_scale
    for index, layer in enumerate(spec.attention):
        p = f"layers.{index}."
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        qkv = norm(x, w[p + "input_norm"]) @ w[p + "qkv"].T + w.get(p + "qkv_bias", torch.zeros(()))
        q, k, v = qkv.view(n, -1, dim).split((heads, kv_heads, kv_heads), 1)
        if spec.qk_norm:
            q, k = norm(q, w[p + "q_norm"]), norm(k, w[p + "k_norm"])
        q, k = rotate(q, spec.rope_tables[index]), rotate(k, spec.rope_tables[index])
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = cap(torch.einsum("qhd,khd->hqk", q, k) * layer.scale, layer.soft_cap)
        visible = (distance >= 0) & (distance < (layer.sliding_window or n))
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).reshape(n, -1)
        branch = attended @ w[p + "o"].T + w.get(p + "o_bias", torch.zeros(()))
        x = x + (norm(branch, w[p + "attention_out_norm"]) if spec.sandwich_norms else branch)
        gate, up = (norm(x, w[p + "mlp_norm"]) @ w[p + "gate_up"].T).chunk(2, -1)
        silu = spec.activation is Activation.SILU
        act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
        branch = (act * up) @ w[p + "down"].T
        x = x + (norm(branch, w[p + "mlp_out_norm"]) if spec.sandwich_norms else branch)
    hidden = norm(x, w["final_norm"])
    return cap(hidden @ w["embed" if spec.tied else "head"].T, spec.logit_soft_cap), hidden


def decoder(
    spec: DecoderSpec, request: FuseRequest, allocator: CpuAllocator, tables: RopeTables | None = None
) -> CpuDecoder:
    """Return a decoder whose parameters are named as in its specification."""
    names = {name: name for name in spec.weight_shapes()}
    return CpuDecoder(spec, request, allocator, rotary_tables(spec) if tables is None else tables, names, {})


@dataclass
class Runner:
    """A decoder with its cache, and sequences that grow step by step."""

    spec: DecoderSpec
    dtype: DType
    weights: dict[str, Tensor]
    max_tokens: int = 128
    max_samples: int = 64
    tables: RopeTables | None = None
    adapters: dict[str, AdapterWeights] = field(default_factory=dict)
    context: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = hardpoint_backend().probe().devices[0]
        self.allocator = CpuAllocator(device)
        self.attention = CpuAttention(device)
        plan = self.attention.plan(
            AttentionRequest(self.spec.attention, self.dtype, self.dtype, BLOCK_SIZE, MAX_CONTEXT)
        )
        assert isinstance(plan, AttentionPlan)
        self.plan = plan
        request = FuseRequest(
            self.dtype, KVCacheGroup.whole(plan), self.max_tokens, self.max_samples, MAX_CONTEXT, bool(self.adapters)
        )
        assert not refusals(self.spec, request)
        self.program = decoder(self.spec, request, self.allocator, self.tables)
        for name, tensor in self.weights.items():
            self.program.load_weight(name, tensor)
        if self.adapters:
            self.program.take_adapters(self.adapters)
        self.blocks_per_seq = MAX_CONTEXT // BLOCK_SIZE
        self.cache = self.allocator.empty(plan.kv_cache.shape(16 * self.blocks_per_seq), self.dtype, KV_CACHE)
        self.cache.fill_(float("nan"))

    def step(
        self,
        new_tokens: dict[int, list[int]],
        output: str = "logits",
        rows: list[int] | None = None,
        adapted: dict[int, int] | None = None,
    ) -> Tensor:
        """Append tokens to sequences, run, and return the output of `rows` (by default the last token of each sequence).

        Args:
            adapted: slots of sequences that go through adapters.
        """
        starts = [len(self.context.setdefault(seq, [])) for seq in new_tokens]
        for seq, tokens in new_tokens.items():
            self.context[seq] = self.context[seq] + tokens
        lengths = [len(tokens) for tokens in new_tokens.values()]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int64)
        owner = np.repeat(np.array(list(new_tokens), np.int64), lengths)
        # Blocks of a sequence descend, so that a kernel which ignored the table would fail.
        table = ((np.arange(16)[:, None] + 1) * self.blocks_per_seq - 1 - np.arange(self.blocks_per_seq)[None]).astype(
            np.int32
        )
        slots = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        query_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        seqs = np.array(list(new_tokens), np.int32)
        none = np.empty((0, 2), np.int32)
        batch = StepBatch(
            token_ids=np.array([t for tokens in new_tokens.values() for t in tokens], np.int64),
            positions=positions,
            slot_mapping=slots.astype(np.int32),
            query_start=query_start,
            context_lens=np.array([len(self.context[seq]) for seq in new_tokens], np.int32),
            block_table=table,
            rows=seqs,
            seq_ids=seqs.astype(np.int64),
            num_decodes=0,
            sample_rows=np.arange(len(seqs), dtype=np.int32),
            sample_seq_ids=seqs.astype(np.int64),
            swap_out=none,
            swap_in=none,
            copies=none,
            preempted=np.empty(0, np.int64),
        )
        wanted = torch.tensor(query_start[1:] - 1 if rows is None else rows, dtype=torch.int32)
        metadata = self.attention.prepare(self.plan, batch)
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        through = adapter_rows(owner, adapted) if adapted else None
        hidden = self.program.run(token_ids, positions, (metadata,), self.cache, wanted, None, through)
        return (hidden if output == "hidden" else getattr(self.program, output)(hidden)).clone()


def adapter_rows(owner: np.ndarray, slots: dict[int, int]) -> AdapterRows:
    """Return which tokens, of these sequences, go through which slot."""
    by_slot = {
        slot: np.flatnonzero(np.isin(owner, [seq for seq in slots if slots[seq] == slot])) for slot in slots.values()
    }
    starts = np.cumsum([0, *map(len, by_slot.values())]).tolist()
    return AdapterRows(
        torch.from_numpy(np.concatenate(list(by_slot.values()))),
        torch.tensor(list(by_slot), dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        tuple(zip(by_slot, starts, starts[1:], strict=False)),
    )


def random_adapters(spec: DecoderSpec, ranks: tuple[int, ...]) -> dict[str, AdapterWeights]:
    """Return seeded float32 adapters of all linear layers, a slot of each rank; those of up projections have no matrices for the gates."""
    generator, found, most = torch.Generator().manual_seed(1), {}, max(ranks) + 1
    for name, shape in spec.weight_shapes().items():
        if len(shape) == 1 or not name.startswith("layers."):
            continue
        cut = shape[0] // 2
        spans = ((0, cut), (cut, shape[0])) if name.endswith((".qkv", ".gate_up")) else ((0, shape[0]),)
        down = torch.randn(len(ranks), len(spans) * most, shape[1], generator=generator) * 0.1
        up = torch.randn(len(ranks), most, shape[0], generator=generator) * 0.1
        of_parts = torch.tensor(ranks, dtype=torch.int32)[:, None].repeat(1, len(spans))
        if name.endswith(".gate_up"):
            of_parts[:, 0] = 0
        scales = torch.rand(len(ranks), len(spans), generator=generator) + 0.5
        found[name] = AdapterWeights(down, up, of_parts, scales, spans)
    return found


def merged(weights: dict[str, Tensor], adapters: dict[str, AdapterWeights], slot: int) -> dict[str, Tensor]:
    """Return weights with a slot's adapter added, in float64."""
    found = {name: tensor.double() for name, tensor in weights.items()}
    for name, one in adapters.items():
        most = one.up.shape[1]
        for part, (first, end) in enumerate(one.spans):
            rank = int(one.ranks[slot, part])
            a = one.down[slot, part * most : part * most + rank].double()
            b = one.up[slot, :rank, first:end].double()
            found[name][first:end] += float(one.scales[slot, part]) * b.T @ a
    return found


def tokens_of(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def tolerance(dtype: DType) -> float:
    """Bound on the error of logits of order one: float32 sums, or activations rounded to 8 (11) bits some 30 times in a row."""
    return {DType.FLOAT32: 3e-5, DType.BFLOAT16: 0.15, DType.FLOAT16: 2e-2}[dtype]


def test_layers_for_which_a_rows_adapter_has_nothing() -> None:
    spec = FAMILIES["qwen2"]
    weights, adapters = random_weights(spec, torch.float32), random_adapters(spec, (3, 9, 5))
    for name, one in adapters.items():
        one.ranks[1] = 0
        if not name.endswith(".down"):
            one.ranks[2] = 0
    prompts, slots = {seq: tokens_of(seq, 20) for seq in range(4)}, {1: 1, 2: 0, 3: 2}
    found = Runner(spec, DType.FLOAT32, weights, adapters=adapters).step(prompts, adapted=slots)
    plain = Runner(spec, DType.FLOAT32, weights).step(prompts)
    assert torch.equal(found[[0, 1]], plain[[0, 1]])
    # Most layers of this step add nothing to any row.
    some = {seq: prompts[seq] for seq in (1, 3)}
    alone = Runner(spec, DType.FLOAT32, weights, adapters=adapters).step(some, adapted={1: 1, 3: 2})
    assert torch.equal(alone, found[[1, 3]])
    for seq in (2, 3):
        expected, _ = reference_logits(spec, merged(weights, adapters, slots[seq]), torch.tensor(prompts[seq]))
        torch.testing.assert_close(found[seq].double(), expected[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "odd-sizes", "gemma2"])
def test_adapters_are_added_to_all_linear_layers(family: str) -> None:
    spec = FAMILIES[family]
    weights, adapters = random_weights(spec, torch.float32), random_adapters(spec, (3, 9))
    runner = Runner(spec, DType.FLOAT32, weights, max_tokens=400, adapters=adapters)
    # More rows than are computed together; then decodes beside a prompt, of which the last row alone is wanted: products bring the next
    # layer's adapters.
    prompts, slots = {seq: tokens_of(seq, 80) for seq in range(4)}, {1: 1, 2: 0, 5: 1}
    later = {0: [5], 1: [6], 2: [7], 3: [8], 5: tokens_of(5, 60)}
    first, second = runner.step(prompts, adapted=slots), runner.step(later, adapted=slots)
    plain = Runner(spec, DType.FLOAT32, weights, max_tokens=400)
    assert torch.equal(first[[0, 3]], plain.step(prompts)[[0, 3]])
    assert torch.equal(second[[0, 3]], plain.step(later)[[0, 3]])
    for row, (seq, tokens) in enumerate(runner.context.items()):
        changed = merged(weights, adapters, slots[seq]) if seq in slots else weights
        expected, _ = reference_logits(spec, changed, torch.tensor(tokens))
        torch.testing.assert_close(second[row].double(), expected[-1], atol=1e-4, rtol=0)
        if seq in prompts:
            torch.testing.assert_close(first[row].double(), expected[79], atol=1e-4, rtol=0)
    with pytest.raises(InvalidOperand, match="made without adapters"):
        plain.step({0: [5]}, adapted={0: 0})
    with pytest.raises(InvalidOperand, match="slot 2"):
        runner.step({1: [5]}, adapted={1: 2})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_prefill_and_decode_agree_with_float64(family: str, dtype: DType) -> None:
    spec = FAMILIES[family]
    weights = random_weights(spec, dtype.to_torch())
    runner = Runner(spec, dtype, weights)
    tokens = tokens_of(1, 30)
    expected, hidden = reference_logits(spec, weights, torch.tensor(tokens))
    bound = tolerance(dtype)

    prefill = runner.step({3: tokens[:20]}, rows=list(range(20)))
    assert (prefill - expected[:20]).abs().max() < bound
    for position in range(20, 30):
        logits = runner.step({3: [tokens[position]]})
        assert (logits[0] - expected[position]).abs().max() < bound

    again = Runner(spec, dtype, weights)
    states = again.step({0: tokens}, "hidden", rows=list(range(30)))
    assert states.dtype is dtype.to_torch()
    assert (states.double() - hidden).abs().max() < 2 * bound


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_every_instruction_set_agrees_with_float64(isa: str, dtype: DType) -> None:
    _native.set_isa(isa)
    weights = random_weights(GEMMA2, dtype.to_torch())
    tokens = tokens_of(2, 24)
    expected, _ = reference_logits(GEMMA2, weights, torch.tensor(tokens))
    runner = Runner(GEMMA2, dtype, weights)
    prefill = runner.step({0: tokens[:23]}, rows=list(range(23)))
    assert (prefill - expected[:23]).abs().max() < tolerance(dtype)
    assert (runner.step({0: tokens[23:]})[0] - expected[23]).abs().max() < tolerance(dtype)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_mixed_batch_gives_the_bits_of_each_sequence_alone(dtype: DType) -> None:
    weights = random_weights(QWEN3, dtype.to_torch())
    prompts = {seq: tokens_of(10 + seq, n) for seq, n in enumerate((1, 7, 24, 33))}

    def run(groups: list[list[int]], threads: int) -> dict[int, Tensor]:
        _native.set_num_threads(threads)
        runner = Runner(QWEN3, dtype, weights)
        runner.step({0: prompts[0]})
        runner.step({1: prompts[1][:4]})
        logits: dict[int, Tensor] = {}
        rest = {0: [5], 1: prompts[1][4:], 2: prompts[2], 3: prompts[3]}
        for group in groups:
            logits |= dict(zip(group, runner.step({seq: rest[seq] for seq in group}), strict=True))
        return logits

    together = run([[0, 1, 2, 3]], threads=1)
    alone = run([[3], [2], [1], [0]], threads=2)
    for seq, logits in together.items():
        assert torch.equal(logits, alone[seq]), f"sequence {seq}"


def test_chunked_prefill_gives_the_logits_of_one_prefill() -> None:
    weights = random_weights(LLAMA, torch.float32)
    tokens = tokens_of(3, 50)
    whole = Runner(LLAMA, DType.FLOAT32, weights).step({0: tokens})
    chunked = Runner(LLAMA, DType.FLOAT32, weights)
    chunked.step({0: tokens[:17]}, rows=[])
    chunked.step({0: tokens[17:31]}, rows=[])
    assert (chunked.step({0: tokens[31:]}) - whole).abs().max() < tolerance(DType.FLOAT32)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_argmax_output_is_the_argmax_of_the_logits(family: str, count: int) -> None:
    spec = FAMILIES[family]
    weights = random_weights(spec, torch.bfloat16)
    tokens = tokens_of(4, 30)
    rows = list(range(30 - count, 30))
    logits = Runner(spec, DType.BFLOAT16, weights).step({0: tokens}, rows=rows)
    chosen = Runner(spec, DType.BFLOAT16, weights).step({0: tokens}, "argmax", rows=rows)
    assert chosen.dtype is torch.int64
    assert chosen.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_logits(family: str, dtype: torch.dtype) -> None:
    spec = FAMILIES[family]
    runner = Runner(spec, DType.of(dtype), random_weights(spec, dtype))
    hidden = runner.step({0: tokens_of(4, 40)}, "hidden", rows=list(range(40)))
    hidden[7] = torch.nan
    hidden[8] = 0.0  # all logits are equal
    targets = torch.tensor([*tokens_of(5, 38), 0, VOCAB - 1])
    logits = runner.program.logits(hidden).clone()
    for count in (0, 1):
        found = runner.program.logprobs(hidden, targets, count)
        assert found is not None
        ids, values, ranks = found
        expected_ids, expected_values, expected_ranks = ranking.logprobs(logits, targets, count)
        finite = torch.arange(40) != 7
        assert torch.equal(ids[finite], expected_ids[finite])
        assert torch.equal(ranks[finite], expected_ranks[finite])
        assert (values - expected_values)[finite].abs().max() < 1e-5
        assert values[7].isnan().all()
        alone = runner.program.logprobs(hidden[3:4], targets[3:4], count)
        assert alone is not None
        assert torch.equal(alone[1], values[3:4])
    assert runner.program.logprobs(hidden, targets, 2) is None
    with pytest.raises(InvalidOperand, match="token 99 is not in"):
        runner.program.logprobs(hidden[:1], torch.tensor([VOCAB]), 1)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_log_probabilities_have_the_error_of_float32_sums(isa: str, offset: float) -> None:
    """Logits of one term each, from equal ones to ones too far from the best to count, against float64."""
    _native.set_isa(isa)
    vocab, count = 500, 53
    spec = replace(LLAMA, vocab_size=vocab, tied=False)
    weights = random_weights(spec, torch.float32)
    head = torch.zeros(vocab, spec.hidden_size)
    head[:, 0] = (
        offset + torch.linspace(-1, 1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    )
    runner = Runner(spec, DType.FLOAT32, weights | {"head": head})
    hidden = torch.zeros(count, spec.hidden_size)
    hidden[:, 0] = torch.cat((torch.linspace(-1, 1, count // 2), torch.linspace(-200, 200, count - count // 2)))
    targets = torch.arange(count) * 9
    logits = hidden[:, :1] * head[:, 0]
    assert torch.equal(runner.program.logits(hidden), logits)
    found = runner.program.logprobs(hidden, targets, 1)
    assert found is not None
    ids, values, ranks = found
    exact = logits.double().log_softmax(-1)
    expected = torch.stack((exact.gather(1, targets[:, None])[:, 0], exact.max(1).values), 1)
    rounding = 2**-23 * (expected.abs() + logits.double().logsumexp(-1).abs()[:, None])
    assert ((values - expected).abs() <= 3e-7 + rounding).all()
    assert torch.equal(ids, torch.stack((targets, logits.argmax(1)), 1))
    assert torch.equal(ranks, 1 + (logits > logits.gather(1, targets[:, None])).sum(1))
    for rows in (slice(7, 8), slice(3, 40)):  # a row's bits do not depend on those beside it
        some = runner.program.logprobs(hidden[rows], targets[rows], 1)
        assert some is not None
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(some, found, strict=True))


@pytest.mark.parametrize("isa", _native.available_isas())
def test_log_probabilities_of_infinite_logits_and_of_some_that_are_not_numbers(isa: str) -> None:
    _native.set_isa(isa)
    spec = replace(LLAMA, vocab_size=130, tied=False)
    head = torch.zeros(130, spec.hidden_size)
    head[::2, 0], head[1::2, 0] = 2.0, -2.0
    head[64:128, 0] = -2.0  # a whole group of columns
    head[129, 0] = 0.0
    runner = Runner(spec, DType.FLOAT32, random_weights(spec, torch.float32) | {"head": head})
    hidden = torch.zeros(3, spec.hidden_size)
    hidden[:, 0] = torch.tensor([3e38, 1.0, 1.0])
    found = runner.program.logprobs(hidden, torch.tensor([129, 129, 0]), 1)
    assert found is not None
    ids, values, ranks = found
    assert values[0, 0] == -torch.inf
    assert values[0, 1].isnan()
    assert ids[:, 1].tolist() == [0, 0, 0]
    assert ranks.tolist() == [34, 34, 1]
    assert values[1:].isfinite().all()
    head[77, 0] = torch.nan
    runner.program.load_weight("head", head)
    found = runner.program.logprobs(hidden, torch.tensor([129, 129, 0]), 1)
    assert found is not None
    assert found[1].isnan().all()


def test_log_probabilities_of_more_rows_than_a_step_samples() -> None:
    runner = Runner(LLAMA, DType.FLOAT32, random_weights(LLAMA, torch.float32), max_tokens=45, max_samples=2)
    hidden = runner.step({0: tokens_of(4, 45)}, "hidden", rows=list(range(45)))
    targets = torch.tensor(tokens_of(5, 45))
    found = runner.program.logprobs(hidden, targets, 1)
    assert found is not None
    for row in range(45):
        alone = runner.program.logprobs(hidden[row : row + 1], targets[row : row + 1], 1)
        assert alone is not None
        assert all(torch.equal(whole[row : row + 1], part) for whole, part in zip(found, alone, strict=True))
    none = runner.program.logprobs(hidden[:0], targets[:0], 1)
    assert none is not None
    assert [list(part.shape) for part in none] == [[0, 2], [0, 2], [0]]


def test_rows_may_repeat_and_come_in_any_order() -> None:
    weights = random_weights(LLAMA, torch.float32)
    tokens = tokens_of(5, 12)
    every = Runner(LLAMA, DType.FLOAT32, weights).step({0: tokens}, rows=list(range(12)))
    some = Runner(LLAMA, DType.FLOAT32, weights).step({0: tokens}, rows=[7, 2, 7, 11])
    assert torch.equal(some, every[[7, 2, 7, 11]])


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_weights_read_back_as_loaded_and_can_be_replaced(dtype: DType) -> None:
    spec = replace(ODD_SIZES, qkv_bias=True, tied=False)
    weights = random_weights(spec, dtype.to_torch())
    runner = Runner(spec, dtype, weights)
    for name, tensor in weights.items():
        assert torch.equal(runner.program.read_weight(name), tensor), name
    other = random_weights(spec, dtype.to_torch(), seed=1)
    for name, tensor in other.items():
        runner.program.load_weight(name, tensor)
    tokens = tokens_of(6, 9)
    assert torch.equal(runner.step({0: tokens}), Runner(spec, dtype, other).step({0: tokens}))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_weights_may_come_by_rows_from_several_threads(dtype: DType) -> None:
    spec = replace(ODD_SIZES, qkv_bias=True, tied=False)
    runner = Runner(spec, dtype, random_weights(spec, dtype.to_torch()))
    other = random_weights(spec, dtype.to_torch(), seed=1)
    with ThreadPoolExecutor(4) as threads:
        pieces = [
            threads.submit(runner.program.load_weight, name, tensor[row : row + 21], row)
            for name, tensor in other.items()
            for row in range(0, len(tensor), 21)
        ]
    assert not any(piece.exception() for piece in pieces)
    for name, tensor in other.items():
        assert torch.equal(runner.program.read_weight(name), tensor), name


def test_packed_weights_take_the_bytes_of_the_plain_ones() -> None:
    spec = replace(LLAMA, vocab_size=96, hidden_size=64, intermediate_size=64)
    device = hardpoint_backend().probe().devices[0]
    allocator = CpuAllocator(device)
    plan = CpuAttention(device).plan(AttentionRequest(spec.attention, DType.BFLOAT16, DType.BFLOAT16, 8, MAX_CONTEXT))
    assert isinstance(plan, AttentionPlan)
    program = decoder(spec, FuseRequest(DType.BFLOAT16, KVCacheGroup.whole(plan), 16, 4, MAX_CONTEXT), allocator)
    shapes = spec.weight_shapes().values()
    plain = sum(2 * s[0] * s[1] if len(s) == 2 else 4 * s[0] for s in shapes)
    stats = allocator.stats().tags
    assert plain <= stats["weights"].allocated <= plain + 64 * len(shapes)
    assert program.scratch_bytes() == stats["default"].allocated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.step({0: [VOCAB]}), "vocabulary"),
        (lambda r: r.step({0: [-1]}), "vocabulary"),
        (lambda r: r.step({0: [1]}, rows=[1]), "row 1"),
        (lambda r: r.step({0: [1] * 40, 1: [1] * 40, 2: [1] * 49}), "129 tokens"),
        (lambda r: r.step({0: [1]}, rows=[0] * 65), "65 rows"),
        (lambda r: r.program.load_weight("layers.9.qkv", torch.zeros(1)), "layers.9.qkv"),
        (lambda r: r.program.load_weight("embed", torch.zeros(VOCAB, 41)), "embed"),
        (lambda r: r.program.load_weight("embed", torch.zeros(VOCAB - 1, LLAMA.hidden_size)), "embed"),
        (lambda r: r.program.load_weight("embed", torch.zeros(2, LLAMA.hidden_size), VOCAB - 1), "embed"),
        (lambda r: r.program.load_weight("embed", torch.zeros(2, LLAMA.hidden_size), -1), "embed"),
        (lambda r: Runner(LLAMA, DType.FLOAT32, {}, tables=()), "rotary"),
    ],
)
def test_a_wrong_step_or_weight_is_refused_with_its_reason(change: Callable[[Runner], object], message: str) -> None:
    runner = Runner(LLAMA, DType.FLOAT32, random_weights(LLAMA, torch.float32))
    with pytest.raises(ValueError, match=message):
        change(runner)


def test_a_decoder_that_cannot_be_run_is_refused_with_every_reason() -> None:
    device = hardpoint_backend().probe().devices[0]
    spec = replace(LLAMA, attention=(replace(LAYER, alibi=True),) * 3, rotary_dim=18)
    plan = CpuAttention(device).plan(AttentionRequest(spec.attention, DType.FLOAT32, DType.FLOAT32, 8, MAX_CONTEXT))
    assert isinstance(plan, AttentionPlan)
    text = "; ".join(refusals(spec, FuseRequest(DType.FLOAT8_E4M3, KVCacheGroup.whole(plan), 16, 4, MAX_CONTEXT)))
    for part in ("float8_e4m3fn", "ALiBi", "rotary dimension 18", "KV cache of float32"):
        assert part in text
