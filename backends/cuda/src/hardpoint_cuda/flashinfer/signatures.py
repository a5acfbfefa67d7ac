"""What is called of FlashInfer, and whether the installed release takes these calls: read from its source, without importing it.

The calls are those of FlashInfer 0.7.2. Every argument is given by its name, but for queries and cache: a release in which a class, a
method or an argument is missing, or that asks for one more, is not used, and says why.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from importlib.util import find_spec
from pathlib import Path

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


@dataclass(frozen=True)
class Call:
    """One method as it is called.

    Attributes:
        file: of the class, in FlashInfer's folder.
        arguments: names of all arguments that are given.
    """

    file: str
    owner: str
    method: str
    arguments: tuple[str, ...]

    def differences(self, folder: Path) -> list[str]:
        """Return why the method that is installed in a folder would not take the call, one sentence each."""
        owner = _classes(folder / self.file).get(self.owner)
        if owner is None:
            return [f"{self.file} has no class {self.owner}"]
        name = f"{self.owner}.{self.method}"
        found = _signature(owner, self.method)
        if found is None:
            return [f"there is no {name}"]
        known, needed = found
        return [
            *(f"{name} has no argument {given}" for given in self.arguments if given not in known),
            *(f"{name} asks for {missing}" for missing in needed if missing not in self.arguments),
        ]


_LAYER = (
    "num_qo_heads", "num_kv_heads", "page_size", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type",
)  # fmt: skip
_DECODES = ("indptr", "indices", "last_page_len", "head_dim", *_LAYER)
_PREFILLS = (
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "head_dim_qk", "causal", *_LAYER,
)  # fmt: skip
_BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
_RUN = ("q", "paged_kv_cache", "k_scale", "v_scale", "out")

CALLS = (
    Call(
        "decode.py",
        DECODE,
        "__init__",
        ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", *_BUFFERS, "backend"),
    ),
    Call("decode.py", DECODE, "plan", _DECODES),
    Call("decode.py", DECODE, "workspace_size", _DECODES),
    Call("decode.py", DECODE, "reset_workspace_buffer", ("float_workspace_buffer", "int_workspace_buffer")),
    Call("decode.py", DECODE, "run", _RUN),
    Call("prefill.py", PREFILL, "__init__", ("float_workspace_buffer", "kv_layout", "backend")),
    Call("prefill.py", PREFILL, "plan", _PREFILLS),
    Call("prefill.py", PREFILL, "run", _RUN),
)
"""All methods that are called; a test compares each with the released package."""


def differences(folder: Path) -> list[str]:
    """Return why the FlashInfer in a folder does not take the calls, one sentence each; empty when it does."""
    return list(dict.fromkeys(sentence for call in CALLS for sentence in call.differences(folder)))


@cache
def flashinfer_obstacle() -> str:
    """Return why FlashInfer cannot be tried, in words that follow its name; "" when it can. Imports nothing of it."""
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return "is not installed"
    found = differences(Path(next(iter(spec.submodule_search_locations))))
    return (
        f"{flashinfer_version()} is installed and has other functions than are called: {'; '.join(found)}"
        if found
        else ""
    )


def flashinfer_version() -> str:
    """Return the installed release."""
    try:
        return distribution_version("flashinfer-python")
    except PackageNotFoundError:
        return "of an unknown release"


@cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    if not file.exists():
        return {}
    return {node.name: node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)}


def _signature(owner: ast.ClassDef, method: str) -> tuple[set[str], list[str]] | None:
    """Return a method's arguments and those that have no default; None for no such method.

    Of overloads the last definition counts. Arguments that a `plan` hands on by their names are those of `_plan_impl`.
    """
    found = {node.name: node.args for node in owner.body if isinstance(node, ast.FunctionDef)}
    if method not in found:
        return None
    arguments = found[method]
    places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    needed = places[: len(places) - len(arguments.defaults)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        places.append(argument.arg)
        needed += [argument.arg] if default is None else []
    more = _signature(owner, f"_{method}_impl") if arguments.kwarg else None
    return {*places, *(more[0] if more else ())}, [*needed, *(more[1] if more else ())]
