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
