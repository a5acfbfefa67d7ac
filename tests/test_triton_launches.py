"""Launches over compiled kernels that are kept: always the one that Triton would choose, and none where someone watches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton import knobs
from triton import language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import JITFunction, driver

from hardpoint.triton import dispatch
from hardpoint.triton.dispatch import Launch

TARGETS = {"native": GPUTarget("cuda", 90, 32), "by storage": GPUTarget("hip", "gfx942", 64)}
"""A target whose compiler leaves the rules for tensors to Triton, and one whose compiler has its own."""
GRID = (3, 2, 1)
BLOCK = 64
MEMORY = torch.zeros(1 << 12, dtype=torch.uint8)
LARGE = torch.empty(1 << 32, dtype=torch.uint8)  # never touched, so that it takes no memory
DTYPES = (torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)


class Device:
    """Triton's driver for a process with several devices."""

    def __init__(self) -> None:
        self.current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


class Compiled(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = object(), object()
        self.launches: list[tuple[Any, ...]] = []
        self._run = lambda *given: self.launches.append(given)


class Kernel(JITFunction):  # type: ignore[misc]
    """A kernel of two tensors and two numbers, which Triton compiles for each specialisation of them."""

    def __init__(self, target: GPUTarget) -> None:
        self.arg_names = ["x", "y", "n", "scale", "BLOCK"]
        self.pre_run_hooks: list[Any] = []
        self.backend = make_backend(target)
        self.device_caches = {device: ({}, {}, target, self.backend, None) for device in (0, 1)}
        self.compiled: dict[Any, Compiled] = {}
        self.asked: list[Any] = []

    def serving(self, *args: Any) -> Compiled:
        """Return what Triton would compile for the arguments, on the current device."""
        kinds = [native_specialize_impl(self.backend, arg, False, True, True) for arg in args]
        return self.compiled.setdefault((driver.active.get_current_device(), *map(str, kinds)), Compiled())

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Compiled:
        self.asked.append((grid, args, named))
        return self.serving(*args)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(dispatch, "_device", lambda tensor: 0)  # where the host's tensors are said to be
    active = driver._active
    device = Device()
    driver.set_active(device)
    yield device
    driver._active = active


def part(offset: int, dtype: torch.dtype = torch.float16, memory: torch.Tensor = MEMORY) -> torch.Tensor:
    """Return 16 bytes of memory from `offset` on."""
    return memory[offset : offset + 16].view(dtype)


def launch_of(kernel: Any) -> Launch:
    return Launch(kernel, {"BLOCK": BLOCK, "num_warps": 4})


def test_the_second_launch_of_a_kind_goes_past_triton(device: Device) -> None:
    kernel = Kernel(TARGETS["native"])
    launch, x, y = launch_of(kernel), part(0), part(32)
    launch(GRID, (x, x), 48, 0.5)
    assert kernel.asked == [(GRID, (x, x, 48, 0.5), {"BLOCK": BLOCK, "num_warps": 4})]
    launch((7, 1, 1), (x, y), 48, 0.5)
    assert len(kernel.asked) == 1
    used = kernel.serving(x, y, 48, 0.5)
    arguments = (x.data_ptr(), y.data_ptr(), 48, 0.5, BLOCK)
    assert used.launches == [(7, 1, 1, 100, used.function, used.packed_metadata, None, None, None, *arguments)]


@pytest.mark.parametrize(
    ("change", "args"),
    [
        ("alignment", (part(0), part(8), 48, 0.5)),
        ("dtype", (part(0), part(32, torch.bfloat16), 48, 0.5)),
        ("divisibility", (part(0), part(32), 49, 0.5)),
        ("one", (part(0), part(32), 1, 0.5)),
        ("a float", (part(0), part(32), 48.0, 0.5)),
        ("a truth value", (part(0), part(32), True, 0.5)),
        ("64 bits", (part(0), part(32), 1 << 40, 0.5)),
    ],
)
def test_other_arguments_are_served_by_another_compiled_kernel(
    device: Device, change: str, args: tuple[Any, ...]
) -> None:
    kernel = Kernel(TARGETS["native"])
    launch = launch_of(kernel)
    for _ in range(2):
        launch(GRID, (part(0), part(32)), 48, 0.5)
        launch(GRID, args[:2], *args[2:])
    usual, served = kernel.serving(part(0), part(32), 48, 0.5), kernel.serving(*args)
    assert usual is not served
    assert len(usual.launches) == len(served.launches) == 1


def test_another_device_has_its_own_compiled_kernel_and_stream(device: Device) -> None:
    kernel = Kernel(TARGETS["native"])
    launch, args = launch_of(kernel), (part(0), part(0), 48, 0.5)
    for device.current in (0, 1, 0, 1):
        launch(GRID, args[:2], *args[2:])
    assert len(kernel.asked) == len(kernel.compiled) == 2
    assert [[given[3] for given in used.launches] for used in kernel.compiled.values()] == [[100], [101]]


TENSORS = st.builds(
    part, st.sampled_from([0, 8, 16, 24, 32, 40]), st.sampled_from(DTYPES), st.sampled_from([MEMORY, LARGE])
) | st.builds(part, st.sampled_from([0, 2, 4, 6, 8, 10]))
NUMBERS = (
    st.sampled_from([0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**32, -(2**31), -(2**31) - 1, 2**63 - 1])
    | st.sampled_from([0.0, 1.0, 2.0, 16.0, -0.0, float("nan"), float("inf")])
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
)


@st.composite
def several_launches(draw: st.DrawFn) -> list[tuple[tuple[Any, ...], int]]:
    """Return arguments of launches, and their devices; of few tensors and numbers, so that some launches differ little."""
    tensors, numbers = (st.sampled_from(draw(st.lists(some, min_size=1, max_size=3))) for some in (TENSORS, NUMBERS))
    args = st.tuples(tensors, tensors, numbers, numbers)
    return draw(st.lists(st.tuples(args, st.integers(0, 1)), min_size=1, max_size=8))


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(launches=several_launches())
def test_every_launch_is_served_by_the_compiled_kernel_that_triton_would_choose(
    device: Device, target: str, launches: list[tuple[tuple[Any, ...], int]]
) -> None:
    kernel = Kernel(TARGETS[target])
    launch = launch_of(kernel)
    expected: dict[int, list[tuple[Any, ...]]] = {}
    # Each twice and once more, so that kinds are kept, and found among others.
    for args, device.current in [one for some in launches for one in (some, some)] + launches:
        before = len(kernel.asked)
        launch(GRID, args[:2], *args[2:])
        if len(kernel.asked) == before:
            addresses = tuple(tensor.data_ptr() for tensor in args[:2])
            expected.setdefault(id(kernel.serving(*args)), []).append((*addresses, *map(repr, args[2:])))
    assert expected, "the last launches are all of kinds that were kept"
    for used in kernel.compiled.values():
        found = [(*given[9:11], *map(repr, given[11:13])) for given in used.launches]
        assert found == expected.get(id(used), [])


def test_a_compiler_with_rules_of_its_own_may_look_at_the_memory_around_a_tensor(device: Device) -> None:
    kernel = Kernel(TARGETS["by storage"])
    launch = launch_of(kernel)
    small, large = part(0), part(0, memory=LARGE)
    for x in (small, small, small, large, large):
        launch(GRID, (x, x), 48, 0.5)
    assert kernel.serving(small, small, 48, 0.5) is not kernel.serving(large, large, 48, 0.5)
    assert len(kernel.serving(large, large, 48, 0.5).launches) == 1
    assert len(kernel.asked) == 3, "of the first kind two: it shows that the compiler has such rules"


def test_tensors_on_the_host_are_left_to_triton(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(TARGETS["native"])
    launch = launch_of(kernel)
    for place in (0, -1, -1, 0):
        monkeypatch.setattr(dispatch, "_device", lambda tensor, place=place: place)
        launch(GRID, (part(0), part(0)), 48, 0.5)
    assert len(kernel.asked) == 3


def test_few_kinds_are_kept_of_many(device: Device) -> None:
    kernel = Kernel(TARGETS["native"])
    launch = launch_of(kernel)
    for number in range(2, 10_000):
        launch(GRID, (part(0), part(32)), number, 0.5)
    assert len(launch._kept) <= 4096


def enter_hook() -> Callable[[], None]:
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    return lambda: knobs.runtime.launch_enter_hook.remove(hook)


def exit_function() -> Callable[[], None]:
    chain = knobs.runtime.launch_exit_hook
    knobs.runtime.launch_exit_hook = lambda metadata: None
    return lambda: setattr(knobs.runtime, "launch_exit_hook", chain)


def debugging() -> Callable[[], None]:
    knobs.runtime.debug = True
    return lambda: setattr(knobs.runtime, "debug", False)


@pytest.mark.parametrize("watch", [enter_hook, exit_function, debugging])
def test_launches_that_are_watched_are_triton_s(device: Device, watch: Callable[[], Callable[[], None]]) -> None:
    kernel = Kernel(TARGETS["native"])
    launch, args = launch_of(kernel), (part(0), part(0), 48, 0.5)
    launch(GRID, args[:2], *args[2:])
    end = watch()
    try:
        launch(GRID, args[:2], *args[2:])
    finally:
        end()
    assert len(kernel.asked) == 2
    launch(GRID, args[:2], *args[2:])
    assert len(kernel.asked) == 2


def test_hooks_before_a_kernel_see_every_launch(device: Device) -> None:
    kernel = Kernel(TARGETS["native"])
    kernel.pre_run_hooks.append(lambda *args, **named: None)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(GRID, (part(0), part(0)), 48, 0.5)
    assert len(kernel.asked) == 3


def test_a_kernel_that_a_hook_kept_from_being_compiled_is_asked_for_again(device: Device) -> None:
    kernel = Kernel(TARGETS["native"])
    answers = iter([None, kernel.serving(part(0), part(0), 48, 0.5)])
    kernel.run = lambda *args, **named: next(answers)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(GRID, (part(0), part(0)), 48, 0.5)
    assert len(kernel.serving(part(0), part(0), 48, 0.5).launches) == 1


def test_the_interpreter_has_every_launch() -> None:
    calls: list[Any] = []

    class Interpreted:
        arg_names = ("x", "n", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **named: calls.append((grid, args, named))

    launch, x = launch_of(Interpreted()), part(0)
    for _ in range(2):
        launch(GRID, (x,), 3)
    assert calls == [(GRID, (x, 3), {"BLOCK": BLOCK, "num_warps": 4})] * 2


def scale_rows(x, y, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * scale, mask=i < n)


IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not IN_INTERPRETER, reason="Triton compiles in this process")
def test_with_triton_s_compiler_in_a_process_without_its_interpreter() -> None:
    test = f"{__file__}::{test_kernels_that_triton_compiled_are_launched_as_it_launches_them.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    found = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.skipif(IN_INTERPRETER, reason="once it has run, the interpreter is in the way of Triton's compiler")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_triton_compiled_are_launched_as_it_launches_them(
    device: Device, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches: list[tuple[Any, ...]] = []
    fake: Any = device
    fake.get_current_target = lambda: TARGETS[target]
    fake.launcher_cls = lambda src, metadata: lambda *given: launches.append((src, *given))
    fake.utils = SimpleNamespace(
        get_device_properties=lambda index: {"max_shared_mem": 1 << 16},
        load_binary=lambda name, kernel, shared, index: (object(), f"function of {name}", 0, 0, 1024),
    )
    launch = launch_of(JITFunction(scale_rows))
    for _ in range(3):
        for x in (part(0), part(8)):
            launch(GRID, (x, part(32)), 48, 0.5)
    aligned, other = launches[::2], launches[1::2]
    assert aligned[0][0] is not other[0][0], "tensors that begin elsewhere are served by another compiled kernel"
    for x, (triton_s, *_, ours) in ((part(0), aligned), (part(8), other)):
        assert triton_s[0] is ours[0]
        assert triton_s[1:7] == ours[1:7], "grid, stream, function, metadata"
        assert ours[7:] == (None, None, None, x.data_ptr(), part(32).data_ptr(), *triton_s[12:])
        assert triton_s[12:] == (48, 0.5, BLOCK)
