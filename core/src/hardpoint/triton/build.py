"""What a backend claims whose device torch and Triton compute on: by the torch that is installed, which is not imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from hardpoint.interfaces.capabilities import (
    AttentionCapabilities,
    Capabilities,
    Determinism,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.triton.capabilities import GRAPHS_VARIABLE, triton_attention_capabilities, wanted_graphs
from hardpoint.triton.choice import attention_choice

MAX_RANKS = 8
"""Devices of one machine that share a model's layers."""


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch for a platform for which Triton has a compiler.

    Attributes:
        backend: the backend's name.
        name: the platform's.
        is_built: whether the installed torch is built for it.
        collectives: the platform's library of collectives.
        targets: what the kernels are compiled for in tests.
        verified: where attention and graphs ran on hardware, as the end of a sentence; "" for nowhere.
    """

    backend: str
    name: str
    is_built: Callable[[], bool]
    collectives: str
    targets: str
    verified: str = ""

    @property
    def install(self) -> str:
        """What to do where something is missing."""
        return f"Install torch's build for {self.name}, which brings triton and {self.collectives.upper()}"

    def requirements(self) -> tuple[str, ...]:
        """Return what is not installed that computing needs, one sentence each."""
        needed = {
            f"the installed torch is not built for {self.name}": self.is_built(),
            "triton is not installed": find_spec("triton") is not None,
        }
        return tuple(sentence for sentence, is_there in needed.items() if not is_there)

    def refusal(self, part: str) -> CapabilityRefused:
        """Return the error for a part that cannot be made for want of what `requirements` lists."""
        return CapabilityRefused(
            f"the {part} of backend '{self.backend}' was asked for", self.requirements(), hint=self.install
        )

    def capabilities(
        self,
        missing: tuple[str, ...],
        *,
        has_collectives: bool,
        attention: Callable[[], AttentionCapabilities] = triton_attention_capabilities,
        attention_notes: Callable[[], tuple[str, ...]] = lambda: (f"attention: {attention_choice()}",),
    ) -> Capabilities:
        """Return the claims for a device.

        Args:
            missing: why nothing can be computed on it: then every request for attention is refused, and the notes say why.
            has_collectives: the library of collectives is installed.
            attention, attention_notes: what is claimed of attention, and said of it, where something can be computed.
        """
        collectives = (self.collectives,) if has_collectives and not missing else ()
        scope = TorchPoolScope.ALL if self.is_built() else TorchPoolScope.NONE
        return Capabilities(
            attention=Capabilities.none().attention if missing else attention(),
            memory=MemoryCapabilities(
                sleep_levels=frozenset({0, 1, 2}), tiers=frozenset(SleepTier), elastic=True, torch_pool=scope
            ),
            tensor_parallel=IntSet() if missing else IntSet.between(1, MAX_RANKS if collectives else 1),
            # Torch's matrix products are the vendor's library's, which chooses kernels by the number of rows.
            determinism=Determinism.RUN_TO_RUN,
            collectives=collectives,
            notes=tuple(f"no attention: {reason}" for reason in missing)
            or (*attention_notes(), *self._notes(has_collectives)),
        )

    def _notes(self, has_collectives: bool) -> tuple[str, ...]:
        unproved = "no hardware has run those with prompts"
        graphs = (
            f"graphs: of all steps, since {GRAPHS_VARIABLE}=1 asks for it; {unproved}"
            if wanted_graphs() is GraphLevel.MIXED
            else f"graphs: of decodes; {GRAPHS_VARIABLE}=1 asks for those of all steps, but {unproved}"
        )
        return (
            graphs,
            *(() if has_collectives else (f"ranks: one, since {self.collectives.upper()} is not installed",)),
            f"kernels: tested in Triton's interpreter, and compiled for {self.targets}",
            *((f"attention, graphs: verified {self.verified}",) if self.verified else ()),
            f"{'several ranks' if self.verified else 'attention, graphs, ranks'}: not verified on hardware",
        )
