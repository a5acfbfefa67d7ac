"""How much memory a process may still take (`hardpoint/host_memory.hpp`): the host's, and what each of its control groups leaves of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hardpoint.memory import include_dir

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4 * KIB

PROGRAM = """
#include <cstdio>
#include "hardpoint/host_memory.hpp"

int main(int, char **arguments) {
  std::printf("%llu %llu", static_cast<unsigned long long>(hardpoint::host::total_memory(arguments[1])),
              static_cast<unsigned long long>(hardpoint::host::available_memory(arguments[1])));
}
"""

HOST = {
    "proc/meminfo": f"MemTotal: {64 * GIB // KIB} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB // KIB} kB\n",
    "proc/self/cgroup": "0::/\n",
}
"""64 GiB, of which 40 can be taken, and no limit."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("host") / "memory"
    command = ["c++", "-std=c++17", f"-I{include_dir()}", "-x", "c++", "-", "-o", str(built)]
    subprocess.run(command, input=PROGRAM, text=True, check=True)
    return built


Ask = Callable[[Mapping[str, str]], tuple[int, int]]


@pytest.fixture
def ask(program: Path, tmp_path: Path) -> Ask:
    """Return total and available bytes on a host with these files, beside those of `HOST`."""

    def total_and_available(files: Mapping[str, str]) -> tuple[int, int]:
        for name, text in {**HOST, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        said = subprocess.run([program, tmp_path], capture_output=True, text=True, check=True).stdout
        total, available = map(int, said.split())
        return total, available

    return total_and_available


def group_v2(path: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon {used - cache}\ninactive_anon 0\ninactive_file {cache}\nactive_file 0\n",
    }


def group_v1(path: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        # A v1 group counts itself, and with `total_` those below it too.
        f"{folder}/memory.stat": f"inactive_file 0\ntotal_rss {used - cache}\ntotal_inactive_file {cache}\n",
    }


def test_without_groups_it_is_what_the_host_has(ask: Ask) -> None:
    assert ask({}) == (64 * GIB, 40 * GIB)
    assert ask(group_v2("", "max", GIB)) == (64 * GIB, 40 * GIB)


def test_pages_that_processors_keep_for_their_next_use_can_be_taken(ask: Ask) -> None:
    zone = "Node 0, zone Normal\n  pagesets\n    cpu: 0\n              count: 100\n              high: 5000\n"
    assert ask({"proc/zoneinfo": zone + zone}) == (64 * GIB, 40 * GIB + 200 * PAGE)


def test_page_cache_in_a_group_can_be_taken(ask: Ask) -> None:
    """What a memory-limited container looks like after a checkpoint was read."""
    assert ask(group_v2("", 8 * GIB, 8 * GIB - 10 * MIB, 7 * GIB)) == (8 * GIB, 7 * GIB + 10 * MIB)


def test_a_group_that_holds_more_than_its_limit_has_no_room(ask: Ask) -> None:
    assert ask(group_v2("", 8 * GIB, 9 * GIB)) == (8 * GIB, 0)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [((8, 2), (32, 4), (8, 6)), ((32, 4), (8, 5), (8, 3)), (("max", 4), (16, 6), (16, 10))],
    ids=["its own limit", "that of a group above", "a group above alone"],
)
def test_the_tightest_of_nested_groups_counts(
    inner: tuple[int | str, int], outer: tuple[int, int], expected: tuple[int, int], ask: Ask
) -> None:
    def scaled(limit: int | str, used: int) -> tuple[int | str, int]:
        return limit if isinstance(limit, str) else limit * GIB, used * GIB

    files = {"proc/self/cgroup": "0::/slice/pod/container\n"}
    files |= group_v2("/slice/pod/container", *scaled(*inner)) | group_v2("/slice", *scaled(*outer))
    assert ask(files) == (expected[0] * GIB, expected[1] * GIB)


def test_groups_of_version_1_count(ask: Ask) -> None:
    files = {"proc/self/cgroup": "7:cpuset:/other\n4:hugetlb,memory:/docker/a\n1:name=systemd:/b\n"}
    files |= group_v1("/docker/a", 8 * GIB, 6 * GIB, 5 * GIB) | group_v1("", 0x7FFFFFFFFFFFF000, 9 * GIB)
    assert ask(files) == (8 * GIB, 7 * GIB)


def test_a_container_that_sees_only_its_own_group_is_limited_by_it(ask: Ask) -> None:
    files = {"proc/self/cgroup": "4:memory:/docker/of/the/host\n0::/../system.slice\n"}
    assert ask(files | group_v1("", 4 * GIB, GIB)) == (4 * GIB, 3 * GIB)


def test_what_cannot_be_read_limits_nothing(ask: Ask) -> None:
    files = {
        "sys/fs/cgroup/memory.max": "what\n",
        "sys/fs/cgroup/memory.current": "1\n",
        "proc/self/cgroup": "nonsense\n0::/a\n",
    }
    assert ask(files) == (64 * GIB, 40 * GIB)
