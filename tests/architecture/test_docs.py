"""What the documents name exists: files by their names or the end of their paths, folders, and targets of links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*[\w-]+\.(?:py|pyi|cpp|hpp|h|c|md|sh|toml|txt|json)")
FOLDER = re.compile(r"(?:[\w-]+/)+")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")

ELSEWHERE = {
    *("config.json", "generation_config.json", "tokenizer.json", "hf_quant_config.json"),  # models
    *("report.json", "summary.json", "log.txt", "cuda_misuse.json"),  # what runs write
    *(
        "src/hardpoint_acme/collectives.py",
        "src/hardpoint_acme/graphs.py",
        "src/hardpoint_acme/platform.py",
    ),  # what a vendor may add
    *("Python.h", "npu/graphs.py", "torch_npu/_op_plugin_docs.py"),  # of other projects
    "attention/scatter_pa_kv_cache/op_kernel/scatter_pa_kv_cache_nd.h",
    *("test/test_custom_ops/test_scatter_pa_kv_cache.py", "test_pa_kv_cache_ops.py"),
}
"""Names of files that are not the repository's."""


def documents(root: Path) -> list[Path]:
    return sorted([root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")])


def missing(text: str, paths: set[str]) -> list[str]:
    """Return the files and folders that a document names in code spans and that no path of the repository ends with."""
    folders = {
        f"{'/'.join(parts[:end])}/" for path in paths for parts in [path.split("/")] for end in range(1, len(parts))
    }
    known = {f"/{path}" for path in paths} | {f"/{folder}" for folder in folders}
    named = {span for span in SPAN.findall(text) if FILE.fullmatch(span) or FOLDER.fullmatch(span)} - ELSEWHERE
    return sorted(name for name in named if not any(path.endswith(f"/{name}") for path in known))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in Path(__file__).parents[2].glob("docs/*.md"))]
)
def test_named_files_exist(name: str, root: Path, files: list[Path]) -> None:
    document = root / name if (root / name).exists() else root / "docs" / name
    paths = {str(file.relative_to(root)) for file in files}
    assert missing(document.read_text("utf-8"), paths) == []


GUIDES = ("adding-a-device.md", "device-parts.md", "conformance.md")
"""Documents for vendors, whose names of the API are looked for, too."""
SOURCES = (".py", ".h", ".hpp", ".cpp", ".cmake", ".toml")
OF_OTHERS = re.compile(r"E[A-Z]{3,}|PrivateUse1|torch(\.\w+)+|HARDPOINT_<NAME>_DRIVER")
NAME = re.compile(r"[A-Za-z_][\w.]*")


def unknown_names(text: str, words: set[str], modules: set[str]) -> list[str]:
    """Return names of an API in code spans (dotted, or with a capital letter or an underscore) of which the sources know a part not.

    Of `hardpoint.memory.DriverTable` the longest beginning that is a module has to be one of `modules`, with at most one name after it.
    """
    unknown = []
    for name in set(SPAN.findall(text)):
        is_api = NAME.fullmatch(name) and ("_" in name or "." in name or not name.islower())
        if not is_api or FILE.fullmatch(name) or OF_OTHERS.fullmatch(name):
            continue
        parts = name.split(".")
        is_known = set(parts) <= words
        if parts[0] == "hardpoint":
            depth = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in modules)
            is_known = is_known and len(parts) - depth <= 1
        if not is_known:
            unknown.append(name)
    return sorted(unknown)


def test_names_of_the_api_exist(root: Path, files: list[Path]) -> None:
    ours = [
        file for file in files if file.suffix in SOURCES and not {"tests", "docs"} & {*file.relative_to(root).parts}
    ]
    words = {word for file in ours for word in re.findall(r"\w+", file.read_text("utf-8", errors="replace"))}
    core = root / "core/src"
    modules = {
        ".".join(file.relative_to(core).with_suffix("").parts).removesuffix(".__init__")
        for file in ours
        if core in file.parents
    }
    found = {name: unknown_names((root / "docs" / name).read_text("utf-8"), words, modules) for name in GUIDES}
    assert found == {name: [] for name in GUIDES}
    assert unknown_names("`VirtualAllocator` `hardpoint.memory.open_driver`", words, modules) == []
    assert unknown_names("`VirtualAlocator` `hardpoint.worker.gone.Name`", words, modules) == [
        "VirtualAlocator",
        "hardpoint.worker.gone.Name",
    ]


def test_links_lead_somewhere(root: Path) -> None:
    broken = [
        f"{document.name}: {target}"
        for document in documents(root)
        for target in LINK.findall(document.read_text("utf-8"))
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_a_missing_name_is_seen() -> None:
    paths = {"core/src/engine/core.py", "docs/sleep.md"}
    text = "`engine/core.py` `core.py` `engine/` `engine/gone.py` `ngine/core.py` `config.json` `gone/` `x.y()`"
    assert missing(text, paths) == ["engine/gone.py", "gone/", "ngine/core.py"]
