"""Runs the scripts and writes the document; ends with status 1 where one failed."""

from __future__ import annotations

from .runs import DOCUMENT, document, run_scripts

if __name__ == "__main__":
    runs = run_scripts()
    DOCUMENT.write_text(document(runs), "utf-8")
    failed = [run for run in runs if run.verdict == "failed"]
    for run in failed:
        print(f"{run.name} failed:\n{run.output}")
    print(f"{len(runs)} scripts in {sum(run.cpu_seconds for run in runs):.1f} processor seconds, {len(failed)} failed")
    raise SystemExit(1 if failed else 0)
