"""The tables of models and weight formats in docs/models.md are those that the code makes."""

from __future__ import annotations

from pathlib import Path

from scripts import format_table


def test_the_tables_are_current(root: Path, tmp_path: Path) -> None:
    assert format_table.main(["--check", str(root / "docs" / "models.md")]) == 0
    text = (root / "docs" / "models.md").read_text("utf-8")
    stale = tmp_path / "models.md"
    stale.write_text(text.replace("`LlamaForCausalLM`, ", "", 1), "utf-8")
    assert format_table.main(["--check", str(stale)]) == 1
