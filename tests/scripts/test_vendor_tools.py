"""What the device tests read of vendors' tools: samples of their output, as users of them have published it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import vendor_tools
from tests.device.vendor_tools import MIB, NoTool, Use, amd_smi, check_freed, npu_smi, nvidia_smi, rocm_smi

NVIDIA = "1273\n4\n"

AMD_6 = """WARNING: User is missing the following required groups: render, video. Please add user to these groups.
[
    {
        "gpu": 0,
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 17153, "unit": "MB"},
            "free_vram": {"value": 179439, "unit": "MB"},
            "total_visible_vram": {"value": 196592, "unit": "MB"},
            "used_visible_vram": {"value": 17153, "unit": "MB"}
        }
    },
    {
        "gpu": 1,
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 284, "unit": "MB"},
            "free_vram": {"value": 196308, "unit": "MB"}
        }
    }
]
"""
AMD_7 = """{"gpu_data": [{"gpu": 0, "mem_usage": {
    "total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}}}]}
"""

ROCM = """{"card0": {"VRAM Total Memory (B)": "21458059264", "VRAM Total Used Memory (B)": "27856896"},
"card1": {"VRAM Total Memory (B)": "67108864", "VRAM Total Used Memory (B)": "26079232"},
"system": {"Driver version": "6.7.0"}}
"""

NPU_A2 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1                 Version: 24.1.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2C              | OK            | 86.8        35                0    / 0             |
| 0                         | 0000:66:00.0  | 0           0    / 0          59356/ 65536         |
+===========================+===============+====================================================+
| 1     910B2C              | OK            | 103.1       37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3368 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 1712733       | python                   | 55984                   |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""
NPU_A3 = """
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
+===========================+===============+======================================================================+
"""


def test_outputs_are_read_as_bytes_of_each_device() -> None:
    assert nvidia_smi(NVIDIA) == [1273 * MIB, 4 * MIB]
    assert amd_smi(AMD_6) == [17153 * MIB, 284 * MIB]
    assert amd_smi(AMD_7) == [283 * MIB]
    assert rocm_smi(ROCM) == [27856896, 26079232]
    assert npu_smi(NPU_A2) == [59356 * MIB, 3368 * MIB]
    assert npu_smi(NPU_A3) == [3419 * MIB, 2874 * MIB]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Put a tool that prints something on the path, alone."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, output: str, status: int = 0) -> None:
        (tmp_path / f"{name}.txt").write_text(output + "\n")
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done < "{tmp_path}/{name}.txt"\nexit {status}\n'
        )
        program.chmod(0o755)

    return make


def test_the_first_tool_that_answers_is_asked(put: object) -> None:
    make = put
    assert callable(make)
    with pytest.raises(NoTool, match="amd-smi is not there; rocm-smi is not there"):
        Use.now("rocm")
    make("rocm-smi", ROCM)
    assert Use.now("rocm") == Use("rocm-smi", [27856896, 26079232])
    make("amd-smi", AMD_6)
    assert Use.now("rocm").tool == "amd-smi"
    make("amd-smi", "ERROR: no driver\n", status=1)
    assert Use.now("rocm").tool == "rocm-smi"
    make("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", status=9)
    with pytest.raises(NoTool, match=r"nvidia-smi ended with status 9: NVIDIA-SMI has failed"):
        Use.now("cuda")
    with pytest.raises(NoTool, match="backend 'cpu' has no vendor's tool"):
        Use.now("cpu")


@pytest.mark.parametrize(
    ("backend", "tool", "output"),
    [
        ("cuda", "nvidia-smi", "[Insufficient Permissions]\n"),
        ("rocm", "amd-smi", "nothing"),
        ("rocm", "rocm-smi", '{"card0": {"VRAM (B)": "1"}}'),
        ("ascend", "npu-smi", "| NPU   Name |\n"),
    ],
)
def test_output_of_another_form_is_an_error_that_shows_it(put: object, backend: str, tool: str, output: str) -> None:
    assert callable(put)
    put(tool, output)
    with pytest.raises(ValueError, match=tool) as caught:
        Use.now(backend)
    assert output.strip() in str(caught.value)


def test_a_sleep_is_held_against_the_devices_that_changed_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_tools, "PATIENCE_SECONDS", 0.0)
    before = Use("a tool", [5000 * MIB, 9000 * MIB, 300 * MIB])
    one, two = Use("a tool", [4990 * MIB, 1000 * MIB, 300 * MIB]), Use("a tool", [1000 * MIB, 5000 * MIB, 310 * MIB])
    assert check_freed(before, 8020 * MIB, lambda: one) == 8000 * MIB
    assert check_freed(before, 8000 * MIB, lambda: two, 2) == 8000 * MIB
    assert check_freed(one, -8000 * MIB, lambda: before) == -8000 * MIB
    for freed in (7000 * MIB, 9000 * MIB, -8000 * MIB):
        with pytest.raises(
            AssertionError, match=f"a tool says that 8000 MiB were freed, and the sleep {freed // MIB} MiB"
        ):
            check_freed(before, freed, lambda: one)


def test_a_tool_that_lags_is_asked_again() -> None:
    answers = iter([Use("a tool", [1000 * MIB]), Use("a tool", [200 * MIB])])
    assert check_freed(Use("a tool", [1000 * MIB]), 800 * MIB, lambda: next(answers)) == 800 * MIB
