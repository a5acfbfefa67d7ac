"""Faults of kernel sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import (
    AdapterRows,
    AdapterWeights,
    BlockFormat,
    ExpertsProgram,
    ExpertsRequest,
    LinearProgram,
    LinearRequest,
    Refusal,
)
from hardpoint.interfaces.sampling import Column, SamplingTables
from hardpoint_conformance.block_weights import HALVES, ZERO_POINTS
from hardpoint_conformance.mutants.derived import Faults, Methods

if TYPE_CHECKING:
    from torch import Tensor

_FAULTS = Faults("kernels")
MUTANTS = _FAULTS.mutants
fault = _FAULTS.fault


def _other_parameters(base: Any, column: Column, value: int) -> Methods:
    def sample(self: Any, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        parameters = tables.parameters.clone()
        parameters[:, column] = value
        found: Tensor | None = base.sample(self, logits, step, replace(tables, parameters=parameters))
        return found

    return {"sample": sample}


@fault("The sampler keeps all tokens, whatever top_k says.", "kernels.sample.definition@1")
def sampler_ignores_top_k(base: Any) -> Methods:
    return _other_parameters(base, Column.TOP_K, 1 << 20)


@fault("The sampler does not add biases.", "kernels.sample.definition@1")
def sampler_ignores_biases(base: Any) -> Methods:
    return _other_parameters(base, Column.BIAS, -1)


@fault("A row is sampled with the draw of the row before it.", "kernels.sample.row@1", "kernels.sample.definition@1")
def draws_of_other_rows(base: Any) -> Methods:
    def sample(self: Any, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        other = step.clone()
        other[2] = step[2].roll(1)
        found: Tensor | None = base.sample(self, logits, other, tables)
        return found

    return {"sample": sample}


@fault("A linear layer in a layout of its own leaves its bias out.", "kernels.linear.product@1")
def bias_left_out(base: Any) -> Methods:
    def plan_linear(self: Any, request: LinearRequest) -> LinearProgram | Refusal:
        program: Any = base.plan_linear(self, request)
        if isinstance(program, LinearProgram):
            run = program.run
            program.run = lambda x, weight, bias=None: run(x, weight)  # type: ignore[method-assign]
        return program  # type: ignore[no-any-return]

    return {"plan_linear": plan_linear}


def _other_blocks(base: Any, change: Callable[[Tensor, BlockFormat], None]) -> Methods:
    """Return a kernel set that stores weights in blocks as `change` leaves them: uint8[rows, blocks, bytes of a block]."""

    def plan_linear(self: Any, request: LinearRequest) -> LinearProgram | Refusal:
        program: Any = base.plan_linear(self, request)
        format = request.blocks
        if isinstance(program, LinearProgram) and format is not None:
            write = program.write

            def changed(stored: Tensor, row: int, values: Tensor) -> None:
                blocks = values.clone().view(len(values), -1, format.nbytes)
                change(blocks, format)
                write(stored, row, blocks.flatten(1))

            program.write = changed  # type: ignore[method-assign]
        return program  # type: ignore[no-any-return]

    return {"plan_linear": plan_linear}


def _other_products(base: Any, name: str, other: Callable[[Any], Any]) -> Methods:
    """Return a kernel set whose programs over blocks have another method, made of their own."""

    def plan_linear(self: Any, request: LinearRequest) -> LinearProgram | Refusal:
        program: Any = base.plan_linear(self, request)
        if isinstance(program, LinearProgram) and request.blocks is not None:
            setattr(program, name, other(getattr(program, name)))
        return program  # type: ignore[no-any-return]

    return {"plan_linear": plan_linear}


_VALUES = ("kernels.blocks.product@1", "kernels.blocks.gather@1")
_NUMBERS = {BlockFormat.Q4_0: 2, BlockFormat.Q4_1: 4, BlockFormat.INT4: 6, BlockFormat.INT4_128: 6}
"""Where blocks have their half bytes."""


@fault("Numbers in blocks have the scale of the block beside theirs.", *_VALUES)
def scales_of_other_blocks(base: Any) -> Methods:
    def change(blocks: Tensor, format: BlockFormat) -> None:
        at, size = (HALVES[format][0], 2) if format in HALVES else (0, 4)
        blocks[..., at : at + size] = blocks[..., at : at + size].roll(1, dims=1)

    return _other_blocks(base, change)


@fault("Of numbers in half bytes the two halves are taken for one another.", *_VALUES)
def swapped_nibbles(base: Any) -> Methods:
    def change(blocks: Tensor, format: BlockFormat) -> None:
        if format in _NUMBERS:
            numbers = blocks[..., _NUMBERS[format] :]
            numbers.copy_(numbers >> 4 | numbers << 4)

    return _other_blocks(base, change)


@fault("Minima and zero points of blocks are left out.", *_VALUES)
def lost_zero_points(base: Any) -> Methods:
    def change(blocks: Tensor, format: BlockFormat) -> None:
        at = (4,) if format in ZERO_POINTS else HALVES.get(format, ())[1:]
        for first in at:
            blocks[..., first : first + 2] = 0

    return _other_blocks(base, change)


@fault("Blocks are taken for those one further along their row.", *_VALUES)
def blocks_off_by_one(base: Any) -> Methods:
    def change(blocks: Tensor, format: BlockFormat) -> None:
        blocks.copy_(blocks.roll(1, dims=1))

    return _other_blocks(base, change)


@fault("Activations are rounded by the greatest of all rows of a batch.", "kernels.blocks.row@1")
def activations_rounded_by_batch(base: Any) -> Methods:
    def other(run: Any) -> Any:
        def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            step = x.nan_to_num().abs().amax() / 127
            return run(((x / step).round() * step).to(x.dtype), weight, bias)  # type: ignore[no-any-return]

        return rounded

    return _other_products(base, "run", other)


@fault("Outliers take the precision of the activations beside them.", "kernels.blocks.product@1")
def outliers_rounded_with_the_others(base: Any) -> Methods:
    def other(run: Any) -> Any:
        def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            blocks = x.reshape(*x.shape[:-1], -1, 32)
            steps = blocks.abs().amax(-1, keepdim=True) / 127
            return run(((blocks / steps).round() * steps).nan_to_num().flatten(-2).to(x.dtype), weight, bias)  # type: ignore[no-any-return]

        return rounded

    return _other_products(base, "run", other)


@fault("The row before the wanted one is gathered from a weight in blocks.", "kernels.blocks.gather@1")
def gathers_the_row_before(base: Any) -> Methods:
    return _other_products(base, "gather", lambda gather: lambda weight, rows: gather(weight, (rows - 1).clamp(min=0)))


@fault("The weights of a token's experts are made to add up to 1 where they should not.", "kernels.experts.mixture@1")
def experts_always_renormalised(base: Any) -> Methods:
    def plan_experts(self: Any, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        program: ExpertsProgram | Refusal = base.plan_experts(self, replace(request, renormalise=True))
        return program

    return {"plan_experts": plan_experts}


def _other_adapters(
    base: Any, change: Callable[[AdapterWeights, AdapterRows], tuple[AdapterWeights, AdapterRows]]
) -> Methods:
    """Return a kernel set that adds other adapters, or to other rows."""

    def add_adapters(self: Any, out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> bool:
        done: bool = base.add_adapters(self, out, x, *change(weights, rows))
        return done

    return {"add_adapters": add_adapters}


@fault("Adapters are added without their scale.", "kernels.adapters.product@1")
def adapters_without_scale(base: Any) -> Methods:
    return _other_adapters(base, lambda weights, rows: (replace(weights, scales=weights.scales.clamp(1.0, 1.0)), rows))


@fault("Rows go through the adapter of the group beside theirs.", "kernels.adapters.product@1")
def adapters_of_neighbours(base: Any) -> Methods:
    return _other_adapters(base, lambda weights, rows: (weights, replace(rows, slots=rows.slots.roll(1))))


@fault("The last rank of an adapter is left out.", "kernels.adapters.product@1")
def adapters_lose_a_rank(base: Any) -> Methods:
    return _other_adapters(base, lambda weights, rows: (replace(weights, ranks=(weights.ranks - 1).clamp(min=0)), rows))


@fault("The first row of each step goes through no adapter.", "kernels.adapters.product@1")
def adapters_miss_a_row(base: Any) -> Methods:
    def change(weights: AdapterWeights, rows: AdapterRows) -> tuple[AdapterWeights, AdapterRows]:
        starts = rows.starts.clone()
        starts[0] = 1
        return weights, replace(rows, starts=starts)

    return _other_adapters(base, change)


@fault("Inputs of adapters are scaled by the greatest of all rows of a step.", "kernels.adapters.row@1")
def adapters_scaled_by_batch(base: Any) -> Methods:
    def add_adapters(self: Any, out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> bool:
        step = x.nan_to_num().abs().amax() / 127
        done: bool = base.add_adapters(self, out, ((x / step).round() * step).to(x.dtype), weights, rows)
        return done

    return {"add_adapters": add_adapters}
