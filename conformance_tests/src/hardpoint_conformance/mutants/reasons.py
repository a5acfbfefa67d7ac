"""Why a clause has no mutant: what a fault in the CPU backend cannot show, or what another test shows."""

from __future__ import annotations

from collections.abc import Mapping

_INSTALLED = "it is about what is installed, in a process of its own; a mutant is put together in the suite's process"
_CORE_ALONE = "its calls fail between the driver and the core's own engine: only a fault of the core could make it fail"
_DEMO = "it needs the demo model, and asks of that what other clauses of tokens ask of small models"

WITHOUT_A_MUTANT: Mapping[str, str] = {
    "pack.backend.found@1": _INSTALLED,
    "pack.import.light@1": _INSTALLED,
    "pack.probe.light@1": _INSTALLED,
    "pack.distribution.known@1": _INSTALLED,
    "pack.doctor.record@1": _INSTALLED,
    "driver.quirks.stable@1": "the CPU's driver has no quirks, and no entry for them",
    "driver.host.pinned@1": "the CPU's driver cannot pin host memory",
    "alloc.memory.free@1": "the counter of free memory is `driver.memory.counted@1`'s; here its fault takes minutes to show",
    "alloc.fault.any-call@1": _CORE_ALONE,
    "alloc.fault.open@1": _CORE_ALONE,
    "alloc.fault.pinning@1": _CORE_ALONE,
    "attn.buffers.reused@1": "the CPU has finished when `forward` returns: nothing reads the batch's arrays later",
    "tokens.demo.oracle@1": _DEMO,
    "tokens.demo.sleep@1": _DEMO,
    "worker.refuse.head-dim@1": "the CPU claims every size that is tried",
    "stress.memory.other-process@1": "the CPU's memory is the host's, which has room for both processes",
}
