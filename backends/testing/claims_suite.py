"""What a backend over torch and Triton claims: by what is installed, and by facts of the device; a backend's tests derive from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces import (
    AttentionLayer,
    AttentionRequest,
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    IntSet,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.triton.build import TorchBuild

REQUEST = AttentionRequest((AttentionLayer(8, 8, 64, 0.125),), DType.BFLOAT16, DType.BFLOAT16, 16, 4096)


class TritonClaimsSuite:
    """The claims of one backend.

    Attributes:
        descriptor, capabilities: the backend's modules.
        platform: what torch's build is for.
        collectives: the name of the library; the module has `has_<name>`.
        fact: the property of a device on which attention depends.
        usable: values of it for devices that attention runs on.
        unusable: (a value for one that it does not run on, the reason).
    """

    descriptor: ClassVar[Any]
    capabilities: ClassVar[Any]
    platform: ClassVar[str]
    collectives: ClassVar[str]
    fact: ClassVar[str]
    usable: ClassVar[Sequence[str]]
    unusable: ClassVar[tuple[str, str]]

    @pytest.fixture
    def device(self) -> Device:
        """A device of which nothing is known."""
        return Device(self.descriptor.hardpoint_backend().name, 0, "any", "any")

    @pytest.fixture
    def torch_is_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let nothing be missing that computing needs."""
        monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())

    def test_memory_works_without_torchs_build_and_every_other_part_is_refused(self, device: Device) -> None:
        backend = self.descriptor.hardpoint_backend()
        claims = backend.capabilities(device)
        assert claims.explain(REQUEST)
        assert claims.memory.sleep_levels == {0, 1, 2}
        assert claims.memory.torch_pool is TorchPoolScope.NONE
        assert f"no attention: the installed torch is not built for {self.platform}" in claims.notes
        assert (claims.tensor_parallel, claims.collectives) == (IntSet(), ())
        assert issubclass(backend.allocator(), DeviceAllocator)
        wanted = rf"not built for {self.platform}.*Install torch's build for {self.platform}"
        for part in (backend.attention, backend.worker, backend.kernels):
            with pytest.raises(CapabilityRefused, match=wanted):
                part()

    @pytest.mark.usefixtures("torch_is_built")
    def test_everything_is_claimed_where_nothing_is_missing(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = self.descriptor.hardpoint_backend()
        claims = backend.capabilities(device)
        assert claims.explain(REQUEST) == ()
        assert claims.attention.graph_level is GraphLevel.UNIFORM_DECODE
        assert (claims.collectives, 2 in claims.tensor_parallel) == ((), False)
        monkeypatch.setattr(self.capabilities, f"has_{self.collectives}", lambda: True)
        claims = backend.capabilities(device)
        assert claims.collectives == (self.collectives,)
        assert (8 in claims.tensor_parallel, 9 in claims.tensor_parallel) == (True, False)
        assert any("not verified on hardware" in note for note in claims.notes)

    @pytest.mark.usefixtures("torch_is_built")
    def test_steps_with_prompts_are_captured_where_that_is_asked_for(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = self.descriptor.hardpoint_backend()
        monkeypatch.setenv("HARDPOINT_MIXED_GRAPHS", "1")
        claims = backend.capabilities(device)
        assert claims.attention.graph_level is GraphLevel.MIXED
        assert any("no hardware has run those with prompts" in note for note in claims.notes)
        monkeypatch.setenv("HARDPOINT_MIXED_GRAPHS", "yes")
        with pytest.raises(ConfigError, match="HARDPOINT_MIXED_GRAPHS=yes"):
            backend.capabilities(device)

    @pytest.mark.usefixtures("torch_is_built")
    def test_attention_needs_what_the_kernels_are_made_for(self, device: Device) -> None:
        for value in self.usable:
            assert self._claims(device, value).explain(REQUEST) == (), value
        value, reason = self.unusable
        claims = self._claims(device, value)
        assert claims.explain(REQUEST)
        assert f"no attention: {reason}" in claims.notes

    def _claims(self, device: Device, value: str) -> Any:
        return self.capabilities.capabilities(replace(device, properties={self.fact: value}))
