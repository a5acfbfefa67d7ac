"""The tables in docs/ are those that the code makes, and every environment variable is explained."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from scripts import document_tables

VARIABLE = re.compile(r"""["'](HARDPOINT_[A-Z0-9_]+)["']""")


def test_the_tables_are_current(root: Path) -> None:
    assert document_tables.main(["--check", str(root / "docs")]) == 0


@pytest.mark.parametrize(("name", "part"), [("models.md", "`LlamaForCausalLM`, "), ("settings.md", "longest context")])
def test_a_stale_table_is_found(name: str, part: str, root: Path, tmp_path: Path) -> None:
    for document in document_tables.DOCUMENTS:
        shutil.copy(root / "docs" / document, tmp_path / document)
    text = (tmp_path / name).read_text("utf-8")
    assert part in text
    (tmp_path / name).write_text(text.replace(part, "", 1), "utf-8")
    assert document_tables.main(["--check", str(tmp_path)]) == 1


def test_every_variable_that_the_product_reads_is_explained(root: Path, files: list[Path]) -> None:
    product = [
        file
        for file in files
        if file.suffix in (".py", ".cpp", ".hpp", ".h")
        and any(part in file.relative_to(root).parts for part in ("src", "native"))
        and file.relative_to(root).parts[0] in ("core", "backends")
    ]
    read = {name for file in product for name in VARIABLE.findall(file.read_text("utf-8"))}
    assert {"HARDPOINT_BACKEND", "HARDPOINT_CPU_ISA"} <= read
    explained = (root / "docs" / "settings.md").read_text("utf-8")
    assert sorted(name for name in read if f"`{name}`" not in explained) == []
