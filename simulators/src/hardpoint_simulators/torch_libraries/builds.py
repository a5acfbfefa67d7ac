"""The builds of torch that run over a simulated driver: which binaries they consist of, and what their vendors' libraries look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hardpoint_simulators.libraries import Vendor

Build = Literal["cuda", "ascend"]


@dataclass(frozen=True)
class TorchBuild:
    """One vendor's build of torch.

    Attributes:
        binaries: the build's own binaries, as patterns within the folder in which packages are installed.
        mark: the name of the binary by which the build is told from others.
        companions: other binaries that it is loaded with, as patterns.
        left_out: names of binaries that `import torch` does not load.
        simulated: the simulated libraries, in the order of loading.
        links: the simulated library in which a look-up in a generated one must end, by generated library.
        codes: what failing functions return, by the beginning of their names; vendors' codes for "not supported" where there is one.
    """

    binaries: tuple[str, ...]
    mark: str
    simulated: tuple[Vendor, ...]
    companions: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()
    links: dict[str, Vendor] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)


BUILDS: dict[Build, TorchBuild] = {
    "cuda": TorchBuild(
        binaries=("torch/lib/*.so", "torch/_C*.so"),
        mark="libtorch_cuda.so",
        simulated=("cuda", "cudart"),
        codes={
            "cudart": 801,
            "cuda": 801,
            "cublas": 15,
            "cudnn": 3000,
            "cufft": 16,
            "cusolver": 9,
            "cusparse": 10,
        },
    ),
    "ascend": TorchBuild(
        binaries=("torch_npu/lib/*.so", "torch_npu/_C*.so"),
        mark="libtorch_npu.so",
        simulated=("ascend",),
        companions=("torch/lib/*.so",),
        left_out=frozenset({"libop_plugin_atb.so"}),
        links={"libacl_op_compiler.so": "ascend"},
        codes={"aclrt": 207000, "acl": 200001, "Hccl": 5},
    ),
}
