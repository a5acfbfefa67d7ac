"""Every check of real hardware, in one command: `make device-check`.

    python scripts/device_check.py [--backend NAME] [--simulated] [--gib N] [--python INTERPRETER]

Looks for devices as the backends' probes do. Where there is none, says what it looked for and what it would have run, and ends
with status 0: nothing was checked, and nothing is claimed. Where there are, builds what is needed and runs, for the first device of
each backend, the doctor, the device tests, the misuse probe (CUDA drivers), and the benchmark of sleep and wake. Reports go to $OUT,
else to build/device-check/reports. Status 1 when a check failed, or a driver is there and cannot be used.

`--simulated` runs the same over the simulated CUDA driver, to show that the command works; every report then says so.

Needs the standard library only, and works without a network: for an interpreter in which Hardpoint is not installed, the packages
are built with CMake into build/device-check/site, and used from there. See docs/device-check.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "device-check"
BACKENDS = ("cuda", "rocm", "ascend")
PROBE_SECONDS, STEP_SECONDS = 60, 300
TAIL = 40
"""Lines of a failed check's output that are printed; the log has all."""
MODULES = ("pluggy", "pytest")
BUILD_MODULES = ("pybind11",)


DOCTOR = """
import json, sys
from hardpoint.plugins.doctor import diagnose
print(json.dumps(diagnose(sys.argv[1], memory=True).to_json(), indent=1))
"""
"""`hardpoint doctor --json --memory` without the command line, whose libraries need not be here."""


@dataclass(frozen=True)
class Finding:
    """What a vendor's driver says of its devices.

    Attributes:
        devices: their names.
        reason: why there are none.
        broken: something is there that cannot be used: no reason to say that there is nothing.
        variable, sonames: where the driver was looked for.
        library: the driver that was found.
    """

    backend: str
    variable: str
    sonames: tuple[str, ...]
    devices: tuple[str, ...] = ()
    reason: str = ""
    broken: bool = False
    library: str = ""
    driver_version: str = ""
    simulated: bool = False


@dataclass
class Step:
    """One check.

    Attributes:
        status: "passed", "failed", or "not run" with the reason in `note`.
        report: name of the file with the details.
    """

    name: str
    status: str
    note: str = ""
    report: str = ""
    command: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """The state of one run: where things go, and what was done.

    Attributes:
        python: interpreter with which the checks run.
        environment: of the processes that are started.
        label: put before the names of reports: "simulated_" where the driver is a simulation.
    """

    python: str
    out: Path
    label: str
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    steps: list[Step] = field(default_factory=list)

    def execute(
        self, command: Sequence[str], output: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command in the checkout; returns its status and output, which also goes to the log.

        Args:
            output: file for standard output alone.
            settings: environment variables beside those of the run.
        """
        say("$ " + shlex.join(command))
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=self.environment | dict(settings or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=STEP_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._log(command, str(error))
            return -1, str(error)
        if output is not None:
            output.write_text(ended.stdout, encoding="utf-8")
        text = ended.stdout if output is None else ended.stderr
        self._log(command, text)
        return ended.returncode, text

    def path(self, report: str) -> str:
        """Return a report's path, relative to the checkout where it lies in it."""
        path = self.out / report
        return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)

    def add(self, step: Step) -> Step:
        """Keep a step and print how it ended."""
        self.steps.append(step)
        say(f"  {step.status}: {step.name}{f' ({step.note})' if step.note else ''}")
        return step

    def _log(self, command: Sequence[str], text: str) -> None:
        with (self.out / f"{self.label}log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n{text}\n")


def say(text: str) -> None:
    """Print at once, so that a run that is cut off shows how far it came."""
    print(text, flush=True)


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


def missing(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the modules that an interpreter cannot find."""
    program = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    ended = subprocess.run(
        [python, "-c", program, *modules], env=dict(environment), cwd="/", capture_output=True, text=True, check=False
    )
    return ended.stdout.split() if ended.returncode == 0 else list(modules)


def build(run: Run, backends: Sequence[str]) -> bool:
    """Make Hardpoint importable by the run's interpreter: as it is installed, or else built into build/device-check/site."""
    start = time.perf_counter()
    packages = ["hardpoint", *(f"hardpoint_{backend}" for backend in backends), "hardpoint_simulators"]
    lacking = missing(run.python, MODULES, run.environment)
    if lacking:
        note = f"{run.python} has no {', '.join(lacking)}: `make install` makes an environment; docs/device-check.md"
        run.add(Step("build", "failed", note))
        return False
    if not missing(run.python, packages, run.environment):
        run.add(Step("build", "passed", f"installed in {run.python} already"))
        return True
    if lacking := missing(run.python, BUILD_MODULES, run.environment):
        run.add(Step("build", "failed", f"Hardpoint is not installed, and {run.python} has no {', '.join(lacking)}"))
        return False
    site = WORK / "site"
    shutil.rmtree(site, ignore_errors=True)
    run.environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [run.environment.get("PYTHONPATH", "")])])
    folders = ["core", *(f"backends/{backend}" for backend in backends), "simulators"]
    for folder in folders:
        if not build_package(run, ROOT / folder, site):
            return False
    seconds = time.perf_counter() - start
    run.add(Step("build", "passed", "built with CMake, used from build/device-check/site", seconds=seconds))
    return True


def build_package(run: Run, folder: Path, site: Path) -> bool:
    """Put one of our packages into `site`: sources, native parts, and the metadata by which backends are found."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    for package in (folder / "src").iterdir():
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    lines = [
        line
        for group, entries in project.get("entry-points", {}).items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")

    target = WORK / "cmake" / folder.name
    configure = ["cmake", "-S", str(folder), "-B", str(target), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={run.python}", f"-Dpybind11_DIR={pybind11(run)}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = str(min(os.cpu_count() or 1, 16))
    for command in (
        configure,
        ["cmake", "--build", str(target), "-j", jobs],
        ["cmake", "--install", str(target), "--prefix", str(site)],
    ):
        status, text = run.execute(command)
        if status:
            run.add(Step(f"build of {project['name']}", "failed", last_line(text), f"{run.label}log.txt"))
            return False
    return True


def pybind11(run: Run) -> str:
    """Return the folder of pybind11's CMake files."""
    command = [run.python, "-m", "pybind11", "--cmakedir"]
    return subprocess.run(command, env=run.environment, capture_output=True, text=True, check=False).stdout.strip()


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def simulate(run: Run) -> None:
    """Let the CUDA backend find the simulated driver."""
    program = "from hardpoint_simulators import library; print(library('cuda'))"
    status, text = run.execute([run.python, "-c", program])
    if status:
        sys.exit(f"the simulated driver is not built: {last_line(text)}")
    run.environment[constants("cuda")[0]] = text.strip()


def check_doctor(run: Run, finding: Finding) -> None:
    """What the installation finds, with the memory and quirks of devices that were started for it."""
    report = f"{run.label}{finding.backend}_doctor.json"
    command = [run.python, "-c", DOCTOR, finding.backend]
    step = timed(run, "doctor", command, report, output=run.out / report)
    try:
        (record,) = json.loads((run.out / report).read_text("utf-8"))["backends"]
        memory = record["devices"][0]["memory"]
        note = record["devices"][0]["memory_error"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        memory, note = None, f"no report ({error!r})"
    step.status = "passed" if memory else "failed"
    step.note = f"{memory['free'] >> 20} of {memory['total'] >> 20} MiB free" if memory else note
    if memory:
        step.note += f", quirks: {', '.join(memory['quirks']) or 'none'}"
    run.add(step)


def check_tests(run: Run, finding: Finding) -> None:
    """The device tests; none run, or none passed, is a failure."""
    report = f"{run.label}{finding.backend}_tests.xml"
    command = [run.python, "-m", "pytest", "tests/device", "-q", "-p", "no:cacheprovider"]
    # The conftest file at the top imports torch, which need not be here.
    command += [
        "--confcutdir=tests/device",
        f"--junitxml={run.path(report)}",
        "-o",
        "junit_family=xunit1",
    ]
    settings = {
        "HARDPOINT_DEVICE": f"{finding.backend}:0",
        "HARDPOINT_DEVICE_SIMULATED": "1" if finding.simulated else "0",
    }
    step = timed(run, "device tests", command, report, settings=settings)
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


def check_benchmark(run: Run, finding: Finding, gib: float) -> None:
    """Sleep and wake beside pinned copies."""
    report = f"{run.label}{finding.backend}_sleep.json"
    command = [run.python, "benchmarks/sleep_device.py", "--backend", finding.backend, "--gib", f"{gib:g}"]
    step = timed(run, "benchmark of sleep", [*command, "--json", run.path(report)], report, show=True)
    try:
        found = json.loads((run.out / report).read_text("utf-8"))["verdicts"]
    except (OSError, ValueError):
        step.status = "failed"
    else:
        barred = [verdict for verdict in found if verdict["met"] is not None]
        unmet = [verdict["metric"] for verdict in barred if not verdict["met"]]
        step.note = f"{len(barred) - len(unmet)} of {len(barred)} bars met"
        if unmet:
            step.note += f"; not: {'; '.join(unmet)}"
        if finding.simulated:
            step.note = "no bar is decided over a simulated driver"
    run.add(step)


def timed(
    run: Run,
    name: str,
    command: Sequence[str],
    report: str,
    output: Path | None = None,
    *,
    show: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Step:
    """Run a check's command; returns the step, passed where its status is zero. The caller completes and adds it."""
    (run.out / report).unlink(missing_ok=True)
    start = time.perf_counter()
    status, text = run.execute(command, output, settings)
    if (show or status) and text.strip():
        say("\n".join(text.rstrip().splitlines()[-TAIL:]))
    seconds = round(time.perf_counter() - start, 1)
    if status:
        return Step(name, "failed", last_line(text), report, shlex.join(command), seconds)
    return Step(name, "passed", "", report, shlex.join(command), seconds)


def explain(findings: Sequence[Finding]) -> None:
    """Say what was looked for and what would have been run."""
    say("No accelerator was found, so nothing was checked, and nothing is claimed:")
    for finding in findings:
        say(f"  {finding.backend}: looked for ${finding.variable}, {', '.join(finding.sonames)}: {finding.reason}")
    say("With a device, this command would build Hardpoint and run on it:")
    say("  - the doctor, as `hardpoint doctor --json --memory`: what is found, free memory, quirks of the system")
    say(
        "  - tests/device: driver entries, sleep and wake with every policy, exhausted memory, threads, torch where it is installed"
    )
    say("  - the misuse probe (CUDA): what the driver answers to about 70 wrong calls")
    say("  - benchmarks/sleep_device.py: sleep and wake beside the speed of pinned copies")
    say(
        "Reports would go to $OUT, else to build/device-check/reports. `--simulated` shows the same over the simulated CUDA driver."
    )


def summarise(run: Run, findings: Sequence[Finding], simulated: bool) -> int:
    """Print and store the summary; returns the exit status."""
    failed = [step for step in run.steps if step.status == "failed"]
    broken = [finding for finding in findings if finding.broken]
    say("")
    if simulated:
        say("SIMULATED: this shows that the checks run, and nothing about hardware.")
    width = max(len(step.name) for step in run.steps) if run.steps else 0
    for step in run.steps:
        say(f"  {step.name:{width}}  {step.status:8}  {step.note}")
    for finding in broken:
        say(f"  {finding.backend}: the driver is there and cannot be used: {finding.reason}")
    say(f"{len(run.steps) - len(failed)} of {len(run.steps)} steps without failure. Reports: {run.out}")
    report = {
        "simulated": simulated,
        "passed": not failed and not broken,
        "python": run.python,
        "findings": [asdict(finding) for finding in findings],
        "steps": [asdict(step) for step in run.steps],
    }
    path = run.out / f"{run.label}summary.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or broken else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="look for devices of this backend alone")
    parser.add_argument("--simulated", action="store_true", help="use the simulated CUDA driver")
    parser.add_argument("--gib", type=float, help="of weights in the benchmark; default 8, and 0.25 when simulated")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the checks")
    options = parser.parse_args()
    backends = ["cuda"] if options.simulated else options.backend or list(BACKENDS)

    label = "simulated_" if options.simulated else ""
    out = Path(os.environ.get("OUT") or WORK / "reports").absolute()
    run = Run(options.python, out, label)
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
        gib = options.gib or (0.25 if options.simulated else 8.0)
        for finding in findings:
            if finding.devices:
                say(f"{finding.backend} device 0: {finding.devices[0]}{' (simulated)' if finding.simulated else ''}")
                check_doctor(run, finding)
                check_tests(run, finding)
                check_misuse(run, finding)
                check_benchmark(run, finding, gib)
    return summarise(run, findings, options.simulated)


if __name__ == "__main__":
    sys.exit(main())
