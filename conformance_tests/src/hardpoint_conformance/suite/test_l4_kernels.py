"""Level 4: a backend's kernel set, where it has one: sampling, linear layers in layouts of its own, and experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import (
    Activation,
    AdapterRows,
    AdapterWeights,
    BlockFormat,
    DType,
    ExpertsProgram,
    ExpertsRequest,
    KernelSet,
    LinearProgram,
    LinearRequest,
    Platform,
    SequenceSampling,
)
from hardpoint.sampling.sampler import Sampler
from hardpoint_conformance import sampling_reference
from hardpoint_conformance.batches import same_bits
from hardpoint_conformance.block_weights import BlockMatrix, block_matrix
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.target import Target
from hardpoint_conformance.worker_bench import usual_dtype

COLUMNS = 1003
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "logit_bias": {4: 8.0, 7: 8.0, 900: 8.0, 901: 8.0}},
    {"temperature": 1.0, "allowed_token_ids": (1, 5, 700, 1002)},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset(range(0, 1000, 2))},
)


def _kernels(target: Target) -> KernelSet | None:
    kernels: KernelSet | None = target.descriptor.make("kernels", target.device)
    return kernels


def _sampler(target: Target) -> Sampler:
    platform: Platform = target.descriptor.make("platform", target.device) or Platform(target.device)
    return Sampler(COLUMNS, target.device.torch_device, _kernels(target), platform)


def _sequences(count: int) -> list[SequenceSampling]:
    """Return sequences in all ways, each in a row of its own; some share their seed."""
    return [
        SequenceSampling(number, (3, 8, 1000), seed=number // 3, state_row=2 * number, **way)
        for number, way in enumerate(islice(cycle(WAYS), count))
    ]


def _sample(sampler: Sampler, logits: torch.Tensor, sequences: list[SequenceSampling], position: int) -> list[int]:
    rows = np.asarray([one.state_row for one in sequences], np.int32)
    found = sampler.sample(logits, rows, np.full(len(rows), position, np.int32)).collect()
    return [int(token) for token in found.token_ids]


@clause("kernels.sample.definition@1", Level.WORKER)
def test_tokens_are_those_of_the_definition(target: Target, rng: np.random.Generator) -> None:
    """Tokens that are not drawn are the definition's; drawn ones are among those that it keeps, and the same but for rounding."""
    sampler, sequences = _sampler(target), _sequences(2 * len(WAYS))
    sampler.set_rows(sequences)
    outputs: list[list[int]] = [[] for _ in sequences]
    drawn = same = 0
    for position in range(6):
        logits = (3 * rng.standard_normal((len(sequences), COLUMNS))).astype(np.float32)
        tokens = _sample(sampler, torch.from_numpy(logits).to(target.device.torch_device), sequences, position)
        for row, sequence, output, token in zip(logits, sequences, outputs, tokens, strict=True):
            if sequence.temperature == 0.0:
                assert token == sampling_reference.sample_row(row, sequence, output)
            else:
                processed = sampling_reference.processed_logits(row, sequence, output)
                kept = sampling_reference.kept_weights(processed, sequence)
                assert kept[token] > 0
                drawn, same = drawn + 1, same + (token == sampling_reference.drawn_token(kept, sequence, output))
            output.append(token)
    assert same >= 0.9 * drawn


@clause("kernels.sample.row@1", Level.WORKER)
def test_a_row_is_sampled_alone(target: Target, rng: np.random.Generator) -> None:
    """A row's token depends on its own logits and parameters: it is the same alone and in any batch, also beside rows that have none."""
    together, sequences = _sampler(target), _sequences(2 * len(WAYS))
    together.set_rows(sequences)
    singly = [_sampler(target) for _ in sequences]
    for sampler, sequence in zip(singly, sequences, strict=True):
        sampler.set_rows([sequence])
    broken = replace(sequences[1], seq_id=99, state_row=1)
    together.set_rows([broken])
    for position in range(3):
        logits = torch.from_numpy((2 * rng.standard_normal((len(sequences), COLUMNS))).astype(np.float32))
        wrong = torch.full((1, COLUMNS), float("nan"))
        batch = torch.cat((logits[:4], wrong, logits[4:])).to(target.device.torch_device)
        tokens = _sample(together, batch, [*sequences[:4], broken, *sequences[4:]], position)
        assert tokens.pop(4) == -1
        alone = [
            _sample(sampler, logits[row : row + 1].to(target.device.torch_device), [sequence], position)[0]
            for row, (sampler, sequence) in enumerate(zip(singly, sequences, strict=True))
        ]
        assert tokens == alone


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, device: str) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype.to_torch()).to(device)


@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (33, 96), (130, 40)])
@clause("kernels.linear.product@1", Level.WORKER)
def test_a_linear_layer_of_the_kernel_sets(target: Target, rng: np.random.Generator, rows: int, columns: int) -> None:
    """What a kernel set plans for a weight multiplies by it as it was written, piece by piece, with and without a bias; or is refused."""
    kernels, dtype, device = _kernels(target), usual_dtype(target.claims), target.device.torch_device
    program = None if kernels is None else kernels.plan_linear(LinearRequest(rows, columns, dtype))
    if not isinstance(program, LinearProgram):
        return
    weight, bias = _random(rng, (rows, columns), dtype, device), _random(rng, (rows,), dtype, device)
    stored = torch.zeros(program.weight_shape(), dtype=dtype.to_torch(), device=device)
    for first in (17, 0):
        program.write(stored, first, weight[first : 17 if first == 0 else rows])
    eps = torch.finfo(dtype.to_torch()).eps
    for tokens in (1, 5, 40):
        x = _random(rng, (tokens, columns), dtype, device)
        for added in (None, bias):
            exact = x.double() @ weight.double().T + (0.0 if added is None else added.double())
            bound = 8 * eps * (x.double().abs() @ weight.double().abs().T + 1)
            ratio = float(((program.run(x, stored, added).double() - exact).abs() / bound).max())
            assert ratio <= 1, f"the error is {ratio:.3g} times its bound"


def _blocks(
    target: Target, rng: np.random.Generator, format: BlockFormat, rows: int = 37, blocks: int = 3
) -> tuple[LinearProgram, BlockMatrix, torch.Tensor] | None:
    """Return a program over a weight in blocks, the weight, and it as the program stores it; None where the kernel set has none."""
    kernels = _kernels(target)
    if kernels is None or format not in kernels.block_formats():
        return None
    columns = blocks * max(format.elements, 64)
    program = kernels.plan_linear(LinearRequest(rows, columns, usual_dtype(target.claims), format))
    if not isinstance(program, LinearProgram):
        return None
    matrix = block_matrix(format, rows, columns, rng)
    stored = torch.zeros(program.weight_shape(), dtype=torch.uint8, device=target.device.torch_device)
    for first, last in ((17, rows), (0, 17)):
        program.write(stored, first, matrix.raw[first:last].to(target.device.torch_device))
    return program, matrix, stored


@pytest.mark.parametrize("format", list(BlockFormat))
@clause("kernels.blocks.product@1", Level.WORKER)
def test_products_with_weights_in_blocks(target: Target, rng: np.random.Generator, format: BlockFormat) -> None:
    """A kernel set multiplies by weights in every format of blocks that it names, in the values that the format defines.

    Activations may be rounded to 8 bits in blocks of 32, but not those beyond four root mean squares of their row: they neither lose
    precision nor take it from the others. The errors' mean square is what rounding alone makes of it.
    """
    found = _blocks(target, rng, format, blocks=8)
    if found is None:
        return
    program, matrix, stored = found
    dtype, device = usual_dtype(target.claims), target.device.torch_device
    bias = _random(rng, (len(matrix.values),), dtype, device)
    eps = torch.finfo(dtype.to_torch()).eps
    for tokens in (1, 5, 40):
        x = _random(rng, (tokens, matrix.values.shape[1]), dtype, device)
        for row, at in enumerate(rng.integers(0, x.shape[1], (tokens, 4))):
            x[row, at] *= 100
        plain, sizes = x.double().cpu(), matrix.values.abs()
        # A number at the limit may be on either side of it.
        limit = 4.001 * plain.square().mean(1, keepdim=True).sqrt()
        kept = torch.where(plain.abs() > limit, 0.0, plain)
        steps = kept.view(tokens, -1, 32).abs().amax(-1).repeat_interleave(32, dim=1) / 253
        rounding = 2 * eps * (plain.abs() @ sizes.T + 1)
        usual = (steps.square() @ sizes.square().T / 3).sqrt() + rounding / 4
        for added in (None, bias):
            exact = plain @ matrix.values.T + (0.0 if added is None else added.double().cpu())
            error = (program.run(x, stored, added).double().cpu() - exact).abs()
            ratio = float((error / (steps @ sizes.T + rounding)).max())
            assert ratio <= 1, f"the error is {ratio:.3g} times its bound"
            # A token's errors go together, so that one alone says little.
            ratio = float((error / usual).square().mean().sqrt())
            assert tokens < 40 or ratio <= 1.5, f"the root mean square of errors is {ratio:.3g} times that of rounding"


@pytest.mark.parametrize("format", list(BlockFormat))
@clause("kernels.blocks.row@1", Level.WORKER)
def test_a_row_times_blocks_is_the_same_in_every_batch(
    target: Target, rng: np.random.Generator, format: BlockFormat
) -> None:
    """A row's product with a weight in blocks is the same, bit for bit, alone and beside others, larger ones and NaN included."""
    found = _blocks(target, rng, format)
    if found is None:
        return
    program, matrix, stored = found
    x = _random(rng, (40, matrix.values.shape[1]), usual_dtype(target.claims), target.device.torch_device)
    x[3] *= 1000
    x[4] = float("nan")
    kept = [row for row in range(40) if row != 4]
    alone = torch.cat([program.run(x[row : row + 1], stored) for row in kept])
    assert same_bits(program.run(x, stored)[kept], alone)
    assert same_bits(program.run(x[:6], stored)[[0, 1, 2, 3, 5]], alone[:5])


@pytest.mark.parametrize("format", list(BlockFormat))
@clause("kernels.blocks.gather@1", Level.WORKER)
def test_rows_of_weights_in_blocks(target: Target, rng: np.random.Generator, format: BlockFormat) -> None:
    """Rows of an embedding in blocks are gathered in the values that the format defines, rounded to the dtype."""
    found = _blocks(target, rng, format)
    if found is None:
        return
    program, matrix, stored = found
    ids = torch.tensor([36, 0, 16, 17, 17], device=target.device.torch_device)
    rows = program.gather(stored, ids).double().cpu()
    expected = matrix.values[ids.cpu()]
    eps = torch.finfo(usual_dtype(target.claims).to_torch()).eps
    excess = (rows - expected).abs() - eps * expected.abs()
    assert float(excess.max()) <= 1e-6


@pytest.mark.parametrize("renormalise", [True, False])
@clause("kernels.experts.mixture@1", Level.WORKER)
def test_experts_of_the_kernel_sets(target: Target, rng: np.random.Generator, renormalise: bool) -> None:
    """What a kernel set plans for experts gives each token the weighted sum of the experts that its logits choose; or is refused."""
    kernels, dtype, device = _kernels(target), usual_dtype(target.claims), target.device.torch_device
    experts, top_k, hidden, inner = 6, 2, 32, 24
    request = ExpertsRequest(experts, top_k, hidden, inner, Activation.SILU, dtype, renormalise)
    program = None if kernels is None else kernels.plan_experts(request)
    if not isinstance(program, ExpertsProgram):
        return
    gate_up = _random(rng, (experts * 2 * inner, hidden), dtype, device)
    down = _random(rng, (experts * hidden, inner), dtype, device)
    stored = [torch.zeros(shape, dtype=dtype.to_torch(), device=device) for shape in program.weight_shapes()]
    for first, last in ((50, len(gate_up)), (0, 50)):
        program.write_gate_up(stored[0], first, gate_up[first:last])
    program.write_down(stored[1], 0, down)
    gates = gate_up.double().view(experts, 2 * inner, hidden).cpu()
    downs = down.double().view(experts, hidden, inner).cpu()
    for tokens in (1, 9, 70):
        x, logits = _random(rng, (tokens, hidden), dtype, device), _random(rng, (tokens, experts), dtype, device)
        logits[0, 2] = logits[0, 4] = 9.0
        probabilities = logits.float().softmax(-1).double().cpu()
        order = logits.float().cpu().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        exact = torch.zeros(tokens, hidden, dtype=torch.float64)
        for token, chosen in enumerate(order.tolist()):
            total = sum(probabilities[token, one] for one in chosen) if renormalise else 1.0
            for one in chosen:
                gate, up = (gates[one] @ x[token].double().cpu()).chunk(2)
                activated = torch.nn.functional.silu(gate) * up
                exact[token] += probabilities[token, one] / total * (downs[one] @ activated)
        error = (program.run(x, logits, *stored).double().cpu() - exact).abs().max()
        assert error <= max(8 * torch.finfo(dtype.to_torch()).eps, 1e-5) * exact.abs().max()


_SPANS = ((0, 48), (48, 56), (56, 130))
_RANKS = ((4, 7, 0), (1, 0, 9), (16, 3, 2))
_GROUPS = ((2, (9, 1, 30, 14, 3)), (0, (7,)), (1, tuple(range(31, 52))))


def _adapters(target: Target, rng: np.random.Generator, columns: int = 72) -> AdapterWeights:
    """Return three adapters of a layer of three parts, of unlike ranks."""
    dtype, device, most = usual_dtype(target.claims), target.device.torch_device, 16
    down = torch.zeros(len(_RANKS), len(_SPANS) * most, columns, dtype=dtype.to_torch())
    up = torch.zeros(len(_RANKS), most, _SPANS[-1][1], dtype=dtype.to_torch())
    for slot, ranks in enumerate(_RANKS):
        for part, (rank, (first, end)) in enumerate(zip(ranks, _SPANS, strict=True)):
            down[slot, part * most : part * most + rank] = _random(rng, (rank, columns), dtype, "cpu")
            up[slot, :rank, first:end] = _random(rng, (rank, end - first), dtype, "cpu")
    scales = torch.from_numpy(rng.uniform(0.3, 3.0, (len(_RANKS), len(_SPANS))).astype(np.float32))
    ranks_of = torch.tensor(_RANKS, dtype=torch.int32)
    return AdapterWeights(down.to(device), up.to(device), ranks_of.to(device), scales.to(device), _SPANS)


def _adapter_rows(device: str, groups: tuple[tuple[int, tuple[int, ...]], ...]) -> AdapterRows:
    starts = np.cumsum([0, *(len(tokens) for _, tokens in groups)]).tolist()
    slots = [slot for slot, _ in groups]
    return AdapterRows(
        torch.tensor([token for _, tokens in groups for token in tokens], dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        tuple(zip(slots, starts[:-1], starts[1:], strict=True)),
    )


@clause("kernels.adapters.product@1", Level.WORKER)
def test_adapters_of_the_kernel_sets(target: Target, rng: np.random.Generator) -> None:
    """Rows get what their own adapters make of them, each part by its rank and scale; others keep their bits. Or nothing is done."""
    kernels, dtype, device = _kernels(target), usual_dtype(target.claims), target.device.torch_device
    if kernels is None:
        return
    weights, rows = _adapters(target, rng), _adapter_rows(device, _GROUPS)
    x, before = _random(rng, (52, 72), dtype, device), _random(rng, (52, 130), dtype, device)
    out = before.clone()
    if not kernels.add_adapters(out, x, weights, rows):
        assert same_bits(out, before)
        return
    exact, sizes = before.double().cpu(), before.double().cpu().abs()
    for slot, tokens in _GROUPS:
        for part, (first, end) in enumerate(_SPANS):
            a = weights.down[slot, 16 * part : 16 * part + 16].double().cpu()
            b = weights.up[slot, :, first:end].double().cpu() * float(weights.scales[slot, part])
            for token in tokens:
                row = x[token].double().cpu()
                exact[token, first:end] += row @ a.T @ b
                sizes[token, first:end] += row.abs() @ a.abs().T @ b.abs()
    bound = torch.finfo(dtype.to_torch()).eps * exact.abs() + 64 * torch.finfo(torch.float32).eps * (sizes + 1)
    ratio = float(((out.double().cpu() - exact).abs() / bound).max())
    assert ratio <= 1, f"the error is {ratio:.3g} times its bound"
    others = [row for row in range(52) if all(row not in tokens for _, tokens in _GROUPS)]
    assert same_bits(out[others], before[others])


@clause("kernels.adapters.row@1", Level.WORKER)
def test_a_row_goes_through_its_adapter_alone(target: Target, rng: np.random.Generator) -> None:
    """What an adapter adds to a row is the same, bit for bit, alone and beside rows of any adapter, larger ones and NaN included."""
    kernels, dtype, device = _kernels(target), usual_dtype(target.claims), target.device.torch_device
    if kernels is None:
        return
    weights, x = _adapters(target, rng), _random(rng, (52, 72), dtype, device)
    x[30] *= 1000
    x[14] = float("nan")
    together = torch.zeros(52, 130, dtype=dtype.to_torch(), device=device)
    if not kernels.add_adapters(together, x, weights, _adapter_rows(device, _GROUPS)):
        return
    for slot, tokens in _GROUPS:
        for token in tokens:
            alone = torch.zeros(1, 130, dtype=dtype.to_torch(), device=device)
            kernels.add_adapters(alone, x[token : token + 1], weights, _adapter_rows(device, ((slot, (0,)),)))
            if token != 14:
                assert same_bits(together[token], alone[0])
