"""Faults of kernel sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import ExpertsProgram, ExpertsRequest, LinearProgram, LinearRequest, Refusal
from hardpoint.interfaces.sampling import Column, SamplingTables
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


@fault("The weights of a token's experts are made to add up to 1 where they should not.", "kernels.experts.mixture@1")
def experts_always_renormalised(base: Any) -> Methods:
    def plan_experts(self: Any, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        program: ExpertsProgram | Refusal = base.plan_experts(self, replace(request, renormalise=True))
        return program

    return {"plan_experts": plan_experts}
