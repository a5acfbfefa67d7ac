"""Every check of real hardware, in one command: `make device-check`.

    python scripts/device_check.py [--backend NAME] [--simulated] [--only STEPS] [--quick] [--seconds N] [--gib N] [--python INTERPRETER]

Looks for devices as the backends' probes do. Where there is none, says what it looked for and what it would have run, and ends
with status 0: nothing was checked, and nothing is claimed. Where there are, builds what is needed and runs, for the first device of
each backend, the steps of `STEPS` below. Reports go to $OUT, else to build/device-check/reports. Status 1 when a check failed, a driver is
there and cannot be used, or the time of `--seconds` did not suffice.

`--simulated` runs the same over the simulated CUDA driver, to show that the command works; every report then says so.

Needs the standard library only, and works without a network: for an interpreter in which Hardpoint is not installed, the packages
are built with CMake into build/device-check/site, and used from there. See docs/device-check.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from device_build import build
from device_run import NO_TIME, ROOT, WORK, Finding, Run, Step, last_line, say
from device_steps import (
    check_attention,
    check_conformance,
    check_doctor,
    check_engine,
    check_expandable,
    check_misuse,
    check_mixed,
    check_profile,
    check_sleep,
    check_tests,
)

BACKENDS = ("cuda", "rocm", "ascend")
PROBE_SECONDS = 60
MIN_SECONDS = 20.0
"""Less than this is no time for any step."""

STEPS = {
    "doctor": "the doctor, as `hardpoint doctor --json --memory`: what is found, free memory, quirks of the system",
    "tests": (
        "tests/device: driver entries, sleep and wake with every policy, exhausted memory, threads, torch; an engine with and"
        " without graphs, and its sleep between captured steps"
    ),
    "expandable": "tests/device of torch and of an engine once more, under torch's expandable segments",
    "mixed": "tests/device of an engine once more, with graphs of steps with prompts (HARDPOINT_MIXED_GRAPHS=1)",
    "misuse": "the misuse probe (CUDA): what the driver answers to about 70 wrong calls",
    "attention": "benchmarks/device_attention.py: attention kernels beside the speed of copies and torch's own attention",
    "sleep": "benchmarks/sleep_device.py: sleep and wake beside the speed of pinned copies, and of an engine with its graphs",
    "engine": "benchmarks/device_engine.py: decode and prefill beside the device's limits and transformers",
    "profile": "benchmarks/device_profile.py: where the time of a decode step goes, on the device and on the host",
    "conformance": "the conformance suite: memory, attention, worker, graphs",
}
"""By the names that `--only` takes, in the order in which they run."""


def constants(backend: str) -> tuple[str, tuple[str, ...]]:
    """Return the environment variable and the names by which a backend looks for its driver, from its descriptor."""
    source = ROOT / "backends" / backend / "src" / f"hardpoint_{backend}" / "descriptor.py"
    values: dict[str, Any] = {}
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return values["DRIVER_VARIABLE"], tuple(values["SONAMES"])


def look_for(backend: str, environment: Mapping[str, str]) -> Finding:
    """Ask a vendor's driver for its devices in a process of its own, with the backend's own probe; nothing need be built."""
    variable, sonames = constants(backend)
    finding = Finding(backend, variable, sonames)
    probe = ROOT / "core" / "src" / "hardpoint" / "memory" / "driver_library.py"
    script = ROOT / "backends" / backend / "src" / f"hardpoint_{backend}" / "driver.py"
    command = [sys.executable, "-I", "-S", str(probe), str(script), variable, *sonames]
    try:
        ended = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return replace(finding, reason=f"the driver did not answer within {PROBE_SECONDS} s", broken=True)
    if ended.returncode or not ended.stdout:
        last = "".join(ended.stderr.strip().splitlines()[-1:])
        return replace(finding, reason=f"the probe ended with status {ended.returncode} {last}".strip(), broken=True)
    answer = json.loads(ended.stdout)
    if "unusable" in answer:
        return replace(finding, reason=answer["unusable"], broken=True)
    if "call" in answer:
        reason = f"{answer['call']} returned {answer['status']} ({answer['text']})"
        return replace(finding, reason=reason, broken=True)
    return replace(
        finding,
        devices=tuple(device["name"] for device in answer["devices"]),
        reason=answer["reason"],
        library=answer.get("library", ""),
        driver_version=answer.get("driver_version", ""),
        simulated=answer.get("simulated", False),
    )


def simulate(run: Run) -> None:
    """Let the CUDA backend find the simulated driver."""
    program = "from hardpoint_simulators import library; print(library('cuda'))"
    status, text = run.execute([run.python, "-c", program])
    if status:
        sys.exit(f"the simulated driver is not built: {last_line(text)}")
    run.environment[constants("cuda")[0]] = text.strip()


def explain(findings: Sequence[Finding]) -> None:
    """Say what was looked for and what would have been run."""
    say("No accelerator was found, so nothing was checked, and nothing is claimed:")
    for finding in findings:
        say(f"  {finding.backend}: looked for ${finding.variable}, {', '.join(finding.sonames)}: {finding.reason}")
    say("With a device, this command would build Hardpoint and run on it:")
    for text in STEPS.values():
        say(f"  - {text}")
    say(
        "Reports would go to $OUT, else to build/device-check/reports. `--simulated` shows the same over the simulated CUDA driver."
    )


def summarise(run: Run, findings: Sequence[Finding], simulated: bool) -> int:
    """Print and store the summary; returns the exit status."""
    failed = [step for step in run.steps if step.status == "failed"]
    missed = [step for step in run.steps if step.note == NO_TIME]
    broken = [finding for finding in findings if finding.broken]
    say("")
    if simulated:
        say("SIMULATED: this shows that the checks run, and nothing about hardware.")
    width = max(len(step.name) for step in run.steps) if run.steps else 0
    for step in run.steps:
        say(f"  {step.name:{width}}  {step.status:8}  {step.note}")
    for finding in broken:
        say(f"  {finding.backend}: the driver is there and cannot be used: {finding.reason}")
    not_run = sum(step.status == "not run" for step in run.steps)
    say(f"{len(failed)} of {len(run.steps)} steps failed, {not_run} were not run. Reports: {run.out}")
    report = {
        "simulated": simulated,
        "passed": not (failed or missed or broken),
        "python": run.python,
        "findings": [asdict(finding) for finding in findings],
        "steps": [asdict(step) for step in run.steps],
    }
    path = run.out / f"{run.label}summary.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or missed or broken else 0


def checks(gib: float) -> dict[str, Callable[[Run, Finding], None]]:
    """Return the function of each step.

    Args:
        gib: of weights in the benchmark of sleep.
    """
    return {
        "doctor": check_doctor,
        "tests": check_tests,
        "expandable": check_expandable,
        "mixed": check_mixed,
        "misuse": check_misuse,
        "attention": check_attention,
        "sleep": partial(check_sleep, gib=gib),
        "engine": check_engine,
        "profile": check_profile,
        "conformance": check_conformance,
    }


def steps_asked(text: str) -> list[str]:
    """Return the names in a comma-separated list, in the order in which they run; exits for an unknown one."""
    asked = [name.strip() for name in text.split(",")]
    if unknown := [name for name in asked if name not in STEPS]:
        sys.exit(f"no step is called {', '.join(unknown)}; steps: {', '.join(STEPS)}")
    return [name for name in STEPS if name in asked]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="look for devices of this backend alone")
    parser.add_argument("--simulated", action="store_true", help="use the simulated CUDA driver")
    parser.add_argument(
        "--only", type=steps_asked, default=list(STEPS), help=f"steps, comma-separated: {', '.join(STEPS)}"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="for everything; steps that do not fit are not run"
    )
    parser.add_argument(
        "--quick", action="store_true", help="benchmarks run little, and decide no bar but that of equal tokens"
    )
    parser.add_argument(
        "--gib", type=float, help="of weights in the benchmark; default 8, 0.25 when quick, and 0.0625 when simulated"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter for the checks")
    options = parser.parse_args()
    backends = ["cuda"] if options.simulated else options.backend or list(BACKENDS)

    label = "simulated_" if options.simulated else ""
    out = Path(os.environ.get("OUT") or WORK / "reports").absolute()
    run = Run(options.python, out, label, options.quick, time.monotonic() + options.seconds)
    if options.simulated:
        say("SIMULATED: the CUDA backend over the simulated driver; no hardware is looked for.")
        findings: list[Finding] = []
    else:
        findings = [look_for(backend, run.environment) for backend in backends]
        if not any(finding.devices or finding.broken for finding in findings):
            explain(findings)
            return 0
        if pretended := [finding.backend for finding in findings if finding.simulated]:
            say(f"{', '.join(pretended)}: the driver found is a simulation and no device; --simulated is for that")
            return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{label}log.txt").unlink(missing_ok=True)
    for finding in findings:
        shown = ", ".join(finding.devices) or finding.reason
        say(f"{finding.backend}: {shown}{f' (driver {finding.driver_version})' if finding.devices else ''}")
    present = [finding.backend for finding in findings if finding.devices]
    if (present or options.simulated) and build(run, ["cuda"] if options.simulated else present):
        if options.simulated:
            simulate(run)
            findings = [look_for("cuda", run.environment)]
        gib = options.gib or (0.0625 if options.simulated else 0.25 if options.quick else 8.0)
        for finding in findings:
            if finding.devices:
                say(f"{finding.backend} device 0: {finding.devices[0]}{' (simulated)' if finding.simulated else ''}")
                for name in options.only:
                    if run.left < MIN_SECONDS:
                        run.add(Step(name, "not run", NO_TIME))
                    else:
                        checks(gib)[name](run, finding)
    return summarise(run, findings, options.simulated)


if __name__ == "__main__":
    sys.exit(main())
