"""What needs a process of its own: torch's settings, and the end of the interpreter in every state; over a simulated driver."""

from __future__ import annotations

from typing import Any

import pytest


def test_operators_do_not_pretend_to_compute_on_a_simulated_device(machine: Any, run_child: Any) -> None:
    ended = run_child(
        """
one = torch.ones(64).to(DEVICE.torch_device)
try:
    print((one + 1).cpu())
except RuntimeError as error:
    print("refused")
""",
        TASK_QUEUE_ENABLE="0",  # torch_npu: operators run where they are called, else a failing one ends the process
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["refused"]), ended.stderr


def test_settings_without_expandable_segments_are_accepted(machine: Any, run_child: Any) -> None:
    for variable in machine.settings:
        ended = run_child(
            """
allocator = hardpoint_backend().make("allocator", DEVICE)
with allocator.pool("weights"):
    tensor = torch.empty(1 << 20, device=DEVICE.torch_device)
print(allocator.stats().tags["weights"].allocated > 0)
""",
            **{variable: "expandable_segments:False"},
        )
        assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["True"]), ended.stderr


EXITS = {
    "awake": "",
    "asleep": "allocator.sleep(SleepPlan())",
    "half awake": "allocator.sleep(SleepPlan()); allocator.wake(['weights'])",
    "asleep on disk": "allocator.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory='.'))",
    "within a block": "allocator.pool('weights').__enter__()",
    "by sys.exit within a block": "with allocator.pool('weights'): print(MARK, file=sys.stderr, flush=True); sys.exit(0)",
    "after an error of the device": """
allocator.sleep(SleepPlan())
try:
    tensors[0].cpu()
except RuntimeError:
    pass
""",
    "without tensors": "tensors.clear(); gc.collect()",
    "after close": "allocator.close()",
    "without an allocator": "del allocator; gc.collect()",
}


MEMORY_IN_ALL_WAYS = """
allocator = hardpoint_backend().make("allocator", DEVICE)
with allocator.pool("weights"):
    tensors = [torch.ones(1 << 20).to(DEVICE.torch_device), torch.ones(4 << 20).to(DEVICE.torch_device)]
with allocator.pool("kv_cache", Policy.DISCARD):
    cache = torch.empty(4 << 20, device=DEVICE.torch_device)
own = allocator.empty((100,), DType.FLOAT32)
"""


@pytest.mark.parametrize("state", EXITS)
def test_interpreter_ends_cleanly(machine: Any, run_child: Any, tmp_path: Any, state: str) -> None:
    ended = run_child(
        f"""
{MEMORY_IN_ALL_WAYS}
MARK = "begin of the end"
{EXITS[state]}
print(MARK, file=sys.stderr, flush=True)
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.split("begin of the end\n")[1:] == [""]
    assert list(tmp_path.rglob("*.backup")) == []
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("state", ["", "allocator.sleep(SleepPlan())", "tensors.clear(); del cache"])
def test_interpreter_ends_without_an_abort_on_a_device_that_fails(machine: Any, run_child: Any, state: str) -> None:
    ended = run_child(f"{MEMORY_IN_ALL_WAYS}\n{state}\nsimulator.fail('*', code=999, times=-1)")
    assert ended.returncode == 0, ended.stderr
