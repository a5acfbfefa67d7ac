"""The table of tiles, and the choice of kernels."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, Device, DType
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused, ConfigError
from hardpoint.triton.choice import attention_choice
from hardpoint.triton.tiles import SPLIT_KEYS, TileTarget, decode_tiles, max_splits, padded, prefill_tiles
from hardpoint.worker.dummy_batches import dummy_batch

TARGETS = [
    TileTarget(32, 80, 108),
    TileTarget(32, 90, 132),
    TileTarget(64, 0, 304),
    TileTarget(32, 0, 1, interpreted=True),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_suit_matrix_units_and_the_split_of_contexts(target: TileTarget, itemsize: int) -> None:
    for head_dim in range(16, 257, 16):
        for tiles in (
            *(decode_tiles(head_dim, group, itemsize, target) for group in (1, 7, 16, 40, 64)),
            *(prefill_tiles(head_dim, itemsize, target, unpacks) for unpacks in (False, True)),
        ):
            assert all(n & (n - 1) == 0 for n in (tiles.block_m, tiles.block_n, tiles.warps))
            assert min(tiles.block_m, tiles.block_n) >= 16
        assert SPLIT_KEYS % decode_tiles(head_dim, 8, itemsize, target).block_n == 0


@pytest.mark.parametrize("capability", [86, 89, 120])
def test_decodes_in_float32_fit_into_the_least_shared_memory(capability: int) -> None:
    """Queries, and keys and values of each stage, where the hardware's matrix units do not take them from there."""
    for head_dim in range(16, 257, 16):
        for group in (1, 16, 24, 32, 33, 64):
            tiles = decode_tiles(head_dim, group, 4, TileTarget(32, capability, 84))
            rows = tiles.block_m + 2 * tiles.stages * tiles.block_n
            assert rows * padded(head_dim) * 4 <= 99 << 10


@pytest.mark.parametrize("group", [1, 2, 16, 17, 64])
def test_all_heads_of_a_group_are_in_one_tile(group: int) -> None:
    assert decode_tiles(128, group, 2, TARGETS[1]).block_m >= group


@given(st.integers(1, 128), st.integers(1, 400))
def test_splits_are_within_bounds(kv_heads: int, units: int) -> None:
    assert 8 <= max_splits(kv_heads, TileTarget(32, 90, units)) <= 64


def test_a_single_sequence_fills_the_target() -> None:
    for units in (80, 108, 114, 132, 148):
        programs = 8 * max_splits(8, TileTarget(32, 90, units))
        assert 2 * units - 8 < programs <= 2 * units, "two for each unit, rounded down to whole parts alone"
    assert max_splits(1, TileTarget(32, 90, 132)) == 64


def test_float8_is_converted_by_targets_that_have_the_instruction() -> None:
    assert [target.converts_float8 for target in TARGETS] == [False, True, False, False]


# Choice


@pytest.mark.parametrize(
    ("asked", "kernels", "reason"),
    [
        ("", "triton", "Hardpoint's own kernels"),
        ("auto", "triton", "Hardpoint's own kernels"),
        ("triton", "triton", "HARDPOINT_ATTENTION says so"),
    ],
)
def test_own_kernels_serve_where_nothing_else_can_and_every_library_has_a_reason(
    asked: str, kernels: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
    assert str(attention_choice()) == f"{kernels} ({reason})"
    choice = attention_choice({"swift": "is not installed", "deft": "is unlike these"})
    assert str(choice) == f"{kernels} ({reason}; swift is not installed; deft is unlike these)"


def test_a_trial_decides_where_a_library_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {}
    for asked in ("", "auto", "triton", "swift"):
        monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
        choices[asked] = attention_choice({"swift": "", "deft": "is unlike these"})
    assert [choice.kernels for choice in choices.values()] == ["auto", "auto", "triton", "swift"]
    assert choices[""] == choices["auto"]
    assert "swift for a model that it serves right and faster in a trial" in str(choices["auto"])


@pytest.mark.parametrize(("asked", "found"), [("deft", "deft is unlike these"), ("magic", "'magic' is not known")])
def test_other_kernels_are_refused(asked: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_ATTENTION", asked)
    with pytest.raises(ConfigError, match=f"HARDPOINT_ATTENTION={asked} .*: {found}. .*one of triton, auto, swift"):
        attention_choice({"swift": "", "deft": "is unlike these"})


# Without triton


def test_the_package_and_its_claims_import_neither_torch_nor_triton() -> None:
    program = (
        "import sys, hardpoint.triton as t; t.triton_attention_capabilities(); "
        "sys.exit(' '.join({'torch', 'triton'} & set(sys.modules)) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_attention_without_triton_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint.triton import TritonAttention

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityRefused, match="triton is not installed"):
        TritonAttention(Device("x", 0, "x", "cpu"))


class Starting:
    """Triton's driver of a machine on which it cannot be compiled."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def active(self) -> object:
        raise self._error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("Failed to find C compiler.\nSpecify one"), r"RuntimeError: Failed to find C compiler\."),
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), r"CalledProcessError: .*gcc"),
        (PermissionError(13, "Permission denied", "/cache/triton"), "PermissionError: .*/cache/triton"),
    ],
    ids=["no compiler", "no headers", "no folder"],
)
def test_a_machine_on_which_triton_cannot_start_is_told_what_it_lacks(
    error: Exception, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardpoint.triton import TritonAttention

    for name in ("triton", "triton.runtime"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["triton.runtime"], "driver", Starting(error), raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    attention = TritonAttention(Device("x", 0, "x", "cpu"))
    request = AttentionRequest((AttentionLayer(16, 8, 128, 0.1),), DType.BFLOAT16, DType.BFLOAT16, None, 4096)
    plan = attention.plan(request)
    assert isinstance(plan, AttentionPlan)
    batch = dummy_batch(num_tokens=1, max_len=1, block_size=plan.block_size, max_seqs=1)
    with pytest.raises(BackendUnavailable, match=rf"(?s){found}.*C compiler.*Python\.h.*TRITON_CACHE_DIR"):
        attention.prepare(plan, batch)
