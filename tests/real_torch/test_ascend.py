"""What only Ascend's torch has: operators with schemas, process groups of HCCL; on the real torch_npu over the simulated driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.errors import BackendBroken, WorkerError

from .conftest import BUILD

pytestmark = pytest.mark.skipif(BUILD != "ascend", reason="for torch_npu")

if BUILD == "ascend":
    from hardpoint_ascend.operators import OPERATORS, WRITE_KV, Operator


@pytest.fixture(params=range(2), ids=["attend", "write"])
def operator(request: pytest.FixtureRequest, machine: Any) -> Operator:
    return OPERATORS[request.param]


def test_table_has_every_operator() -> None:
    assert len(OPERATORS) == 2


def test_schemas_are_those_of_the_installed_torch_npu(operator: Operator) -> None:
    import torch_npu

    assert torch_npu.__version__.startswith("2.13")
    assert str(operator.installed()) == str(operator.schema)
    assert operator.bind()._schema == operator.schema


def test_other_schemas_than_the_installed_ones_are_refused(operator: Operator) -> None:
    namespace, arguments = operator.signature.split("Tensor key", 1)
    for wrong in (
        replace(operator, signature=f"{namespace}Tensor keys{arguments}"),
        replace(operator, signature=operator.signature.replace("None", "None, Tensor? extra=None", 1)),
        replace(operator, name=f"{operator.name}_of_another_version"),
    ):
        with pytest.raises(BackendBroken, match=wrong.name) as caught:
            wrong.bind()
        assert f"Expected: {wrong.schema}" in str(caught.value)


def test_default_that_changed_is_refused(machine: Any) -> None:
    changed = replace(WRITE_KV, signature=WRITE_KV.signature.replace("PA_NZ", "Norm"))
    with pytest.raises(BackendBroken, match="argument cache_mode is `keyword Optional\\[str\\] = 'PA_NZ'` and not"):
        changed.bind()


def test_attention_binds_the_real_operators_and_plans(machine: Any) -> None:
    from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, DType

    attention = machine.descriptor.make("attention", machine.devices[0])
    request = AttentionRequest((AttentionLayer(16, 8, 128, 0.1),), DType.BFLOAT16, DType.BFLOAT16, None, 4096)
    plan = attention.plan(request)
    assert isinstance(plan, AttentionPlan)
    assert plan.kv_cache.shape(3) == (1, 2, 3, 128, 8, 128)


def test_ranks_cannot_be_joined_over_a_simulated_driver(machine: Any, unused_port: int) -> None:
    collectives = machine.descriptor.make("collectives", machine.devices[0])
    with pytest.raises(WorkerError, match=r"rank 0 of 1 cannot join the others.*Failed to find function acl"):
        collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)
    with pytest.raises(WorkerError, match="Call start first"):
        collectives.all_reduce(torch.empty(4))
    collectives.stop()
