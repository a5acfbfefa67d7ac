"""The operators of torch_npu that this backend calls, as it expects them.

The schemas are those of torch_npu 2.13, of which only the arguments are here that calls pass. Calls are bound through this table alone:
an operator that is missing, or that does not take these, is an error when attention is made, and not a wrong result later.
An older or newer operator may have other arguments as long as they have defaults, and other defaults of those that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.errors import BackendBroken, CapabilityRefused

if TYPE_CHECKING:
    from torch import Argument, FunctionSchema


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: as torch's registry has it, with the namespace.
        signature: the arguments that every call passes, and the results, as torch writes them; a default stands where the operator has one.
    """

    name: str
    signature: str

    @property
    def schema(self) -> FunctionSchema:
        """What is expected."""
        return torch._C.parse_schema(self.name + self.signature)

    def installed(self) -> FunctionSchema | None:
        """Return what is installed under the name, without an overload's name; None for nothing."""
        found: list[FunctionSchema] = torch._C._jit_get_schemas_for_operator(self.name)
        return next((schema for schema in found if not schema.overload_name), None)

    def differences(self) -> list[str]:
        """Return why calls that keep to the expected schema would not fit the installed operator, one sentence each."""
        found = self.installed()
        return [f"there is no operator {self.name}"] if found is None else _differences(self.schema, found)

    def bind(self) -> Callable[..., Any]:
        """Return the operator, ready to be called.

        Raises:
            CapabilityRefused: torch_npu is not installed.
            BackendBroken: the operator is missing, or is another one than expected.
        """
        if self.installed() is None:
            _import_torch_npu()
        if differences := self.differences():
            found = self.installed()
            raise BackendBroken(
                f"torch_npu's operator {self.name} is not the one that this version of hardpoint-ascend calls",
                found=f"{'; '.join(differences)}. Expected: {self.schema}. Found: {found if found else 'nothing'}",
                hint="Install torch_npu 2.13, and the CANN that goes with it",
            )
        namespace, name = self.name.split("::")
        operator: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
        return operator


ATTEND = Operator(
    "npu::npu_fused_infer_attention_score_v2",
    "(Tensor query, Tensor key, Tensor value, *, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
    "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, int num_query_heads=1, int num_key_value_heads=0, "
    "float softmax_scale=1., int pre_tokens=2147483647, int next_tokens=2147483647, "
    'str input_layout="BSH", int sparse_mode=0, int block_size=0) -> (Tensor, Tensor)',
)
"""Attention over a paged cache, for prompts, chunks of prompts and single tokens in one call."""

KV_LENGTHS = "actual_seq_kvlen"
"""Attention's argument for the keys of each sequence, which captured calls take anew before each replay."""

WRITE_KV = Operator(
    "npu::npu_scatter_pa_kv_cache",
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
    'str? cache_mode="PA_NZ") -> ()',
)
"""Writes keys and values to their slots."""

RMS_NORM = Operator("npu::npu_rms_norm", "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
"""RMSNorm over the axes of gamma, which has the input's dtype: the result, and the reciprocal of the root mean square."""

ROTATE = Operator("npu::npu_rotary_mul", '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half") -> Tensor')
"""`input * r1 + rotate_half(input) * r2` of [batch, tokens, heads, dim]; batch and heads below 1000, dim below 896 and even."""

SWIGLU = Operator("npu::npu_swiglu", "(Tensor input, int dim=-1) -> Tensor")
"""`silu(first half) * second half` along an axis."""

OPERATORS = (ATTEND, WRITE_KV, RMS_NORM, ROTATE, SWIGLU)
"""All operators of torch_npu that are called; a test compares each with the torch_npu that is installed."""


def _import_torch_npu() -> None:
    try:
        import torch_npu  # noqa: F401 - registers the operators
    except ImportError as error:
        raise CapabilityRefused(
            "attention on the backend 'ascend' needs the operators of torch_npu",
            [f"torch_npu cannot be imported ({error})"],
            hint="Install the release of torch_npu that goes with torch",
        ) from error


def _differences(expected: FunctionSchema, found: FunctionSchema) -> list[str]:
    reasons = []
    places = {argument.name: place for place, argument in enumerate(found.arguments)}
    for place, argument in enumerate(expected.arguments):
        if argument.name not in places:
            reasons.append(f"it has no argument {argument.name}")
            continue
        other = found.arguments[places[argument.name]]
        if _written(argument) != _written(other):
            reasons.append(f"its argument {argument.name} is `{_written(other)}` and not `{_written(argument)}`")
        elif not argument.kwarg_only and places[argument.name] != place:
            reasons.append(f"its argument {argument.name} is number {places[argument.name]} and not {place}")
    known = {argument.name for argument in expected.arguments}
    reasons += [
        f"it has one more argument without a default, {argument.name}"
        for argument in found.arguments
        if argument.name not in known and not argument.has_default_value()
    ]
    results = [[str(result.type) for result in schema.returns] for schema in (expected, found)]
    if results[0] != results[1]:
        reasons.append(f"it returns {results[1]} and not {results[0]}")
    return reasons


def _written(argument: Argument) -> str:
    """Return an argument's place among others (keyword or not), type and aliasing, as text."""
    kind = "keyword " if argument.kwarg_only else ""
    alias = "" if argument.alias_info is None else ", written" if argument.alias_info.is_write else ", aliased"
    return f"{kind}{argument.type}{alias}"
