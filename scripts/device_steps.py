"""The checks of a real device, one function each; `device_check.py` runs them."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from device_build import missing
from device_run import Finding, Run, Step, last_line, timed

DOCTOR = """
import json, sys
from hardpoint.plugins.doctor import diagnose
print(json.dumps(diagnose(sys.argv[1], memory=True).to_json(), indent=1))
"""
"""`hardpoint doctor --json --memory` without the command line, whose libraries need not be here."""

COMPUTES = """
import sys
from importlib import import_module
print(import_module(f"hardpoint_{sys.argv[1]}.descriptor").hardpoint_backend().probe().reason)
"""
"""Prints why nothing can be computed on a backend's devices."""

COMPUTING_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "msgspec")
"""What an engine needs beside what the tests of memory need."""

EXPANDABLE = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "rocm": "PYTORCH_HIP_ALLOC_CONF"}
"""By backend, the variable of torch's allocator settings."""

LONGEST_TEST = "tests/device/test_engine.py::test_replays_with_fresh_metadata_give_the_tokens_of_eager_steps"

LEVELS = ("L0", "L1", "L2", "L3", "L4", "L6")
"""Of the conformance suite on one device; L5 is about several ranks, each on a device of its own."""

CONFORMANCE_JOBS = 6
"""Groups of clauses side by side, at most: compiling takes longer than computing."""

FAILURES = ("failed", "error", "crashed", "hung")
LISTED = 10
"""Most names of failed tests that are printed."""

ENGINE_MARGIN = 90.0
"""Seconds beside those that the engine's benchmark measures in: its last process may take so long to start."""

SECONDS = {"device tests": 400.0, "conformance": 1800.0, "benchmark of the engine": 600.0}
"""Most seconds of the steps that take long."""


def check_doctor(run: Run, finding: Finding) -> None:
    """What the installation finds, with the memory and quirks of devices that were started for it."""
    report = f"{run.label}{finding.backend}_doctor.json"
    command = [run.python, "-c", DOCTOR, finding.backend]
    step = timed(run, "doctor", command, report, output=run.out / report)
    try:
        (record,) = json.loads((run.out / report).read_text("utf-8"))["backends"]
        memory, reason = record["devices"][0]["memory"], record["reason"]
        note = record["devices"][0]["memory_error"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        memory, reason, note = None, "", f"no report ({error!r})"
    step.status = "passed" if memory else "failed"
    step.note = f"{memory['free'] >> 20} of {memory['total'] >> 20} MiB free" if memory else note
    if memory and reason:
        # Memory works, and nothing can be computed: of a driver that is older than torch's toolkit, among others.
        step.note += f", and nothing can be computed: {reason}"
    if memory:
        step.note += f", quirks: {', '.join(memory['quirks']) or 'none'}"
    run.add(step)


def check_tests(run: Run, finding: Finding) -> None:
    """The device tests; none run, or none passed, is a failure."""
    _tests(run, finding, "device tests", "tests", ["tests/device"], {})


def check_expandable(run: Run, finding: Finding) -> None:
    """The tests of torch and of a whole engine once more, where torch's segments are expandable, as on many clusters."""
    if finding.backend not in EXPANDABLE:
        run.add(Step("expandable segments", "not run", "the backend refuses them, and says so"))
    elif _computes(run, finding, "expandable segments"):
        files = ["tests/device/test_torch.py", "tests/device/test_engine.py", "--deselect", LONGEST_TEST]
        settings = {EXPANDABLE[finding.backend]: "expandable_segments:True,max_split_size_mb:512"}
        _tests(run, finding, "expandable segments", "expandable", files, settings)


def check_mixed(run: Run, finding: Finding) -> None:
    """The tests of an engine once more, with graphs of steps with prompts, which are captured only where that is asked for."""
    if finding.backend not in EXPANDABLE:
        run.add(Step("graphs of prompts", "not run", "the backend captures decodes alone"))
    elif _computes(run, finding, "graphs of prompts"):
        files = ["tests/device/test_engine.py", "--deselect", LONGEST_TEST]
        _tests(run, finding, "graphs of prompts", "mixed", files, {"HARDPOINT_MIXED_GRAPHS": "1"})


def _tests(
    run: Run, finding: Finding, name: str, kind: str, arguments: Iterable[str], settings: Mapping[str, str]
) -> None:
    report = f"{run.label}{finding.backend}_{kind}.xml"
    command = [run.python, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
    # The conftest file at the top imports torch, which need not be here.
    command += [
        "--confcutdir=tests/device",
        f"--junitxml={run.path(report)}",
        "-o",
        "junit_family=xunit1",
    ]
    settings = {
        **settings,
        "HARDPOINT_DEVICE": f"{finding.backend}:0",
        "HARDPOINT_DEVICE_SIMULATED": "1" if finding.simulated else "0",
    }
    step = timed(run, name, command, report, settings=settings, limit=SECONDS["device tests"])
    try:
        suite = ElementTree.parse(run.out / report).getroot()[0]
        count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, IndexError):
        step.status, step.note = "failed", "no report"
    else:
        passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
        step.note = f"{passed} passed, {count['failures'] + count['errors']} failed, {count['skipped']} skipped"
        if not passed:
            step.status = "failed"
        reasons = sorted({skip.get("message", "") for skip in suite.iter("skipped")})
        step.note += f" ({'; '.join(reasons)})" if reasons else ""
    run.add(step)


def check_misuse(run: Run, finding: Finding) -> None:
    """What the driver answers to misuse, recorded; only CUDA drivers have a probe."""
    if finding.backend != "cuda":
        run.add(Step("misuse probe", "not run", "written for CUDA drivers"))
        return
    report = f"{run.label}cuda_misuse.json"
    script = "simulators/src/hardpoint_simulators/misuse.py"
    command = [run.python, script, "--library", finding.library]
    step = timed(run, "misuse probe", command, report, output=run.out / report)
    if step.status == "passed":
        table = json.loads((run.out / report).read_text("utf-8"))
        answers = table["misuse"].values()
        ended = sum(answer["code"] is None for answer in answers)
        step.note = f"{len(answers)} misuses recorded, {ended} of which ended the process"
        if table["driver"]["simulated"] is not finding.simulated:
            step.status, step.note = "failed", "the probe met another driver than the one that was found"
    run.add(step)


def check_conformance(run: Run, finding: Finding) -> None:
    """The conformance suite: attention, worker, graphs, and all that they stand on."""
    if not _computes(run, finding, "conformance"):
        return
    folder = f"{run.label}{finding.backend}_conformance"
    levels = [*LEVELS, "L5"] if len(finding.devices) > 1 else LEVELS
    command = [run.python, "-m", "hardpoint_conformance.cli", "run", "--backend", finding.backend, "--device", "0"]
    command += [part for level in sorted(levels) for part in ("--level", level)]
    command += ["--jobs", str(max(1, min(CONFORMANCE_JOBS, (os.cpu_count() or 1) // 2)))]
    command += ["--report", run.path(folder)]
    step = timed(run, "conformance", command, f"{folder}/report.json", show=True, limit=SECONDS["conformance"])
    try:
        report = json.loads((run.out / step.report).read_text("utf-8"))
        step.note = f"{report['verdict']['outcome']}: {_counted(report['results'])}"
    except (OSError, ValueError):
        step.status, step.note = (
            "failed",
            f"{step.note}; no report; {_counted(_progress(run.out / folder))}, to be resumed",
        )
    run.add(step)


def _counted(results: Iterable[Mapping[str, Any]]) -> str:
    """Return in words how many tests had which outcome, and which ones failed."""
    outcomes = {result["id"]: result["outcome"] for result in results}
    counts = Counter(outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome in FAILURES]
    listed = f" ({', '.join(failed[:LISTED])}{' ...' if len(failed) > LISTED else ''})" if failed else ""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + listed


def _progress(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Return the results of a run that was ended early."""
    with contextlib.suppress(OSError), (folder / "progress.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"id", "outcome"} <= entry.keys():
                    yield entry


def check_sleep(run: Run, finding: Finding, gib: float) -> None:
    """Sleep and wake beside pinned copies, and of an engine with its graphs."""
    arguments = ["--gib", f"{gib:g}", *(["--rounds", "1", "--model", "tiny"] if run.quick else [])]
    _benchmark(run, finding, "sleep", "benchmark of sleep", "sleep_device.py", arguments)


def check_attention(run: Run, finding: Finding) -> None:
    """Attention kernels beside copies and torch's own."""
    if _computes(run, finding, "benchmark of attention"):
        _benchmark(run, finding, "attention", "benchmark of attention", "device_attention.py", _quick(run))


def check_profile(run: Run, finding: Finding) -> None:
    """Where the time of a decode step goes; holds nothing against a bar."""
    if _computes(run, finding, "profile"):
        _benchmark(run, finding, "profile", "profile", "device_profile.py", ["--quick"] if run.quick else [])


def check_engine(run: Run, finding: Finding) -> None:
    """Decode and prefill of the engine beside the device's limits and transformers."""
    name = "benchmark of the engine"
    if not _computes(run, finding, name):
        return
    limit = min(SECONDS[name], run.left)
    seconds = max(limit - ENGINE_MARGIN, 30.0)
    _benchmark(run, finding, "engine", name, "device_engine.py", ["--seconds", f"{seconds:.0f}", *_quick(run)], limit)


def _benchmark(
    run: Run,
    finding: Finding,
    kind: str,
    name: str,
    script: str,
    arguments: list[str],
    limit: float = 300.0,
) -> None:
    report = f"{run.label}{finding.backend}_{kind}.json"
    command = [run.python, f"benchmarks/{script}", "--backend", finding.backend, *arguments, "--json", run.path(report)]
    step = timed(run, name, command, report, show=True, limit=limit)
    try:
        result = json.loads((run.out / report).read_text("utf-8"))
    except (OSError, ValueError):
        step.status = "failed"
    else:
        barred = [verdict for verdict in result["verdicts"] if verdict["met"] is not None]
        unmet = [verdict["metric"] for verdict in barred if not verdict["met"]]
        step.note = f"{len(barred) - len(unmet)} of {len(barred)} bars met"
        if unmet:
            step.note += f"; not: {'; '.join(unmet)}"
        if finding.simulated:
            step.note = "no bar is decided over a simulated driver"
        for reason in result.get("not_run", []):
            step.note += f"; {reason.splitlines()[0]}"
    run.add(step)


def _quick(run: Run) -> list[str]:
    """Return the arguments for little work, where little is asked for."""
    return ["--quick", "--repeats", "1"] if run.quick else []


def _computes(run: Run, finding: Finding, name: str) -> bool:
    """Whether something can be computed on the device with the interpreter; a step that cannot be run for want of it is added."""
    if finding.simulated:
        reason = "a simulated driver computes nothing"
    else:
        status, text = run.execute([run.python, "-c", COMPUTES, finding.backend])
        if status:
            run.add(Step(name, "failed", last_line(text)))
            return False
        reason = text.strip()
    if reason:
        run.add(Step(name, "not run", reason))
        return False
    if lacking := missing(run.python, COMPUTING_MODULES, run.environment):
        run.add(Step(name, "failed", f"{run.python} has no {', '.join(lacking)}"))
    return not lacking
