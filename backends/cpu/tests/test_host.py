"""What the backend says of the host before anything native is loaded, by the rules of `hardpoint/host_memory.hpp`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint_cpu.driver import driver_table
from hardpoint_cpu.host import total_memory

GIB = 1 << 30


def on_a_host(root: Path, groups: str, **limits: object) -> int:
    """Return the memory of a host of 64 GiB, where the process is in these groups and files below /sys/fs/cgroup have these limits."""
    files = {"proc/meminfo": f"MemFree: 1 kB\nMemTotal: {64 << 20} kB\n", "proc/self/cgroup": groups}
    files |= {f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return total_memory(root)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"memory.max": "max"}, 64),
        ("0::/\n", {"memory.max": 8 * GIB}, 8),
        ("0::/slice/pod/own\n", {"slice/pod/own/memory.max": 2 * GIB, "slice/memory.max": 32 * GIB}, 2),
        ("0::/slice/pod/own\n", {"slice/pod/own/memory.max": "max", "slice/memory.max": 8 * GIB}, 8),
        ("0::/slice/own\n", {"slice/other/memory.max": GIB, "own/memory.max": GIB}, 64),
        ("0::/of/the/host\n", {"memory.max": 4 * GIB}, 4),
        ("7:cpuset:/x\n4:hugetlb,memory:/a/b\n", {"memory/a/memory.limit_in_bytes": 8 * GIB}, 8),
        ("4:memory:/a\n0::/\n", {"memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000}, 64),
        ("nonsense\n0::/a\n", {"memory.max": "what"}, 64),
    ],
)
def test_the_tightest_limit_of_the_processs_group_and_those_above_it_counts(
    groups: str, limits: dict[str, object], expected: int, tmp_path: Path
) -> None:
    assert on_a_host(tmp_path, groups, **limits) == expected * GIB


def test_a_host_without_control_groups_has_all_its_memory(tmp_path: Path) -> None:
    on_a_host(tmp_path, "")
    (tmp_path / "proc/self/cgroup").unlink()
    assert total_memory(tmp_path) == 64 * GIB


def test_it_is_what_the_driver_counts_on_this_host() -> None:
    assert total_memory() == driver_table().memory_info()[1]
