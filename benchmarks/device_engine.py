"""Decoding and prefilling of a whole engine on a device, beside the device's own limits and transformers' continuous batching.

    python benchmarks/device_engine.py --backend cuda [--device 0] [--repeats 3] [--seconds 400] [--json FILE]

The model has the shape of Qwen3-0.6B and random weights in bfloat16, written once to build/benchmarks; all systems load these files
and get the same prompts of random tokens. Each system runs in a process of its own; greedy, prefix caching off, end of text ignored.

Decoding: a case "32 x 512" submits 32 prompts of 512 tokens at once. Its rate is that of the window in which all requests decode and
none is prefilled, the same for every system: from the last request's first token to the first request's last token. The roofline of a
step is the time in which the device copies as many bytes as the step must read at least: all weights once, the embedding as the head
among them, and the keys and values of every sequence. Copies are measured in the same run, before and after. Prefilling: prompts with
one output token, held against matrix products of random numbers.

`--backend cpu --quick` shows that everything runs, with a tiny model; its figures mean nothing and decide no bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from child import ChildFailed, run_script
from device_shapes import DECODERS, Decoder
from report import REPOSITORY, Verdict, command, machine, median, number, table, verdict_table, write_json

PEERS = Path(__file__).parent / "peers"
TOKEN_BUDGET = 8192
"""Tokens of a step: enough for matrix products at their best."""

ROOFLINE_BARS = {1: 0.6, 256: 0.5}
"""Least share of the roofline, by batch size."""

PEER_BARS = {256: 3.0}
"""Least ratio to transformers, by batch size."""

GRAPHS, EAGER = "hardpoint", "hardpoint, eager"


@dataclass(frozen=True)
class Case:
    """Prompts of one length, submitted at once.

    Attributes:
        decodes: what is asked is the rate of decoding, not that of prefilling.
    """

    prompts: int
    length: int
    output_tokens: int
    decodes: bool

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"{'decode' if self.decodes else 'prefill'} {self.prompts} x {self.length}"


@dataclass(frozen=True)
class System:
    """One way to run the model.

    Attributes:
        script: in `peers/`.
        options: beside those that all have.
    """

    name: str
    script: str
    options: dict[str, Any]


def cases_of(quick: bool) -> list[Case]:
    """Return what is run, or little; what a bar is about comes first, since the time may not suffice for all."""
    if quick:
        return [decoding(1, 24, 64), decoding(4, 32, 64), Case(2, 48, 1, decodes=False)]
    sizes = [(256, 512), (1, 512), (32, 512), (1, 4096), (32, 4096), (256, 2048)]
    return [decoding(prompts, length, TOKEN_BUDGET) for prompts, length in sizes] + [
        Case(prompts, length, 1, decodes=False) for prompts, length in ((1, 4096), (16, 512), (16, 4096))
    ]


def decoding(prompts: int, length: int, budget: int) -> Case:
    """Return a case with enough output tokens that the first request is still decoding long after the last one is prefilled."""
    steps_of_prefill = -(-prompts * (length + prompts) // budget)
    return Case(
        prompts, length, 96 + 2 * steps_of_prefill if budget == TOKEN_BUDGET else 16 + 2 * steps_of_prefill, True
    )


def systems_of(torch_device: str) -> list[System]:
    """Return Hardpoint with and without graphs, and transformers as it chooses its settings and as they are best in theory."""
    host = torch_device == "cpu"
    budget = {"max_batch_tokens": 64 if host else TOKEN_BUDGET, "allow_block_sharing": False}
    ours = [System(EAGER, "device_hardpoint.py", {"enforce_eager": True})]
    peers = {"transformers": budget if host else {}}
    if not host:
        ours.insert(0, System(GRAPHS, "device_hardpoint.py", {"enforce_eager": False}))
        peers["transformers, graphs"] = budget | {"use_cuda_graph": True, "use_async_batching": True}
        peers["transformers, compiled"] = peers["transformers, graphs"] | {"default_compile_level": 1}
    return ours + [
        System(name, "device_transformers.py", {"attention": "sdpa", "settings": settings})
        for name, settings in peers.items()
    ]


class Runner:
    """Runs systems and limits in processes of their own, within a time for all of them."""

    def __init__(self, decoder: Decoder, torch_device: str, seconds: float) -> None:
        self._decoder, self._torch_device = decoder, torch_device
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def checkpoint(self, folder: Path) -> None:
        """Write the model, unless the folder has it."""
        if (folder / "model.safetensors").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._decoder.config), encoding="utf-8")
        self._script("device_checkpoint.py", [str(folder), self._torch_device], 120)

    def limits(self, size: int, width: int, repeats: int) -> dict[str, float]:
        """Measure copies of `size` bytes and products of matrices of this width."""
        return self._script("device_limits.py", [self._torch_device, str(size), str(width), str(repeats)], 120)

    def run(self, system: System, common: dict[str, Any], cases: Sequence[Case], repeats: int, share: float) -> Any:
        """Run the cases on a system within a share of the time that is left; returns its answer, or why there is none."""
        deadline = self.left * share
        job = {
            "options": common | system.options,
            "cases": [asdict(case) | {"name": case.name} for case in cases],
            "repeats": repeats,
            "vocab": self._decoder.vocab,
            "deadline_s": deadline,
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(job, file)
            file.flush()
            try:
                return self._script(system.script, [file.name], deadline + 60)
            except ChildFailed as error:
                return {"error": str(error), "cases": {}}

    def _script(self, name: str, arguments: Sequence[str], timeout_s: float) -> Any:
        return run_script(sys.executable, PEERS / name, arguments, timeout_s=timeout_s)


def rates(answer: dict[str, Any], case: Case) -> list[float]:
    """Return tokens per second of every run of a case: of decoding in the window, or of prefilling."""
    runs = answer["cases"].get(case.name, {}).get("runs", [])
    if not case.decodes:
        return [case.prompts * case.length / run["prefill_s"] for run in runs]
    return [run["window_tokens"] / run["window_s"] for run in runs if run["window_s"]]


def rate(answers: dict[str, Any], system: str, case: Case) -> float | None:
    """Return the median rate of a case, None where the system did not run it."""
    found = rates(answers[system], case) if system in answers else []
    return median(found) if found else None


def best_peer(answers: dict[str, Any], case: Case) -> tuple[str, float | None]:
    """Return the peer with the highest rate."""
    found = {name: value for name in answers if "transformers" in name and (value := rate(answers, name, case))}
    return max(found.items(), key=lambda item: item[1]) if found else ("transformers", None)


def roofline(answer: dict[str, Any], case: Case, decoder: Decoder, bandwidth: float) -> float | None:
    """Return the tokens per second of a case's window at the roofline: bytes of its steps over the device's copy bandwidth."""
    runs = [run for run in answer["cases"].get(case.name, {}).get("runs", []) if run["window_s"]]
    if not runs:
        return None
    return median(
        [
            run["window_tokens"] * bandwidth / decoder.decode_bytes(run["window_steps"], run["window_context"])
            for run in runs
        ]
    )


def verdicts(
    answers: dict[str, Any], cases: Sequence[Case], decoder: Decoder, limits: dict[str, float], held: bool
) -> list[Verdict]:
    """Hold the results against limits and peers, and where `held` against the bars."""
    found: list[Verdict] = []
    ours = GRAPHS if GRAPHS in answers else EAGER

    def add(metric: str, mine: float | None, reference: float | None, whose: str, bar: float | None = None) -> None:
        met = None
        if held and bar is not None and mine is not None and reference:
            met = mine >= bar * reference
        found.append(Verdict(metric, mine, reference, whose, None if bar is None else f"≥ {bar:.2f}", met))

    for case in cases:
        mine, (peer, theirs) = rate(answers, ours, case), best_peer(answers, case)
        metric = f"{case.name}, tokens/s"
        if case.decodes:
            at_limit = roofline(answers.get(ours, {"cases": {}}), case, decoder, limits["copy_bytes_per_s"])
            add(metric, mine, at_limit, "roofline of copies", ROOFLINE_BARS.get(case.prompts))
            add(metric, mine, theirs, peer, PEER_BARS.get(case.prompts))
        else:
            operations = decoder.prefill_operations(case.prompts, case.length) / (case.prompts * case.length)
            add(metric, mine, limits["matrix_operations_per_s"] / operations, "matrix peak")
            add(metric, mine, theirs, peer)
        if ours == GRAPHS:
            add(metric, mine, rate(answers, EAGER, case), "the same, eager")
    return found


def equal_first_tokens(answers: dict[str, Any], cases: Sequence[Case]) -> str:
    """Return in words how many first tokens of the first run each system has in common with the first one that has them."""
    lines = []
    reference = next((name for name in answers if answers[name]["cases"]), None)
    for name, answer in answers.items():
        same = both = 0
        for case in cases:
            pair = [a["cases"].get(case.name, {}) for a in (answers[reference or name], answer)]
            if name == reference or any(not part.get("runs") or part["cold"] != pair[0]["cold"] for part in pair):
                continue
            one, other = (part["runs"][0]["first_tokens"] for part in pair)
            same, both = same + sum(a == b for a, b in zip(one, other, strict=True)), both + len(one)
        if both:
            lines.append(f"{name}: {same} of {both} first tokens as {reference}")
    return "; ".join(lines)


def rows_of(answers: dict[str, Any], cases: Sequence[Case]) -> list[list[str]]:
    """Return the table of rates: a row for each case, a column for each system."""
    return [[case.name, *(number(rate(answers, name, case)) for name in answers)] for case in cases]


def failures(answers: dict[str, Any], cases: Sequence[Case]) -> list[str]:
    """Return what did not run, and why."""
    lines = [f"{name}: {answer['error']}" for name, answer in answers.items() if "error" in answer]
    for name, answer in answers.items():
        if "error" in answer:
            continue
        for case in cases:
            entry = answer["cases"].get(case.name)
            if entry is None:
                lines.append(f"{name}, {case.name}: not run, no time was left")
            elif "error" in entry:
                lines.append(f"{name}, {case.name}: {entry['error']}")
            elif case.decodes and not rates(answer, case):
                lines.append(f"{name}, {case.name}: there was no step in which all requests decoded")
    return lines


def torch_device_of(backend: str, device: int) -> tuple[str, bool]:
    """Return torch's name of a backend's device, and whether it is simulated; exits where there is none."""
    from hardpoint.interfaces.errors import HardpointError
    from hardpoint.plugins import resolve_backend

    try:
        found = resolve_backend(backend, device=device).device
    except HardpointError as error:
        sys.exit(str(error))
    return found.torch_device, found.simulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, after one that is not counted")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything; what does not fit is left out")
    parser.add_argument("--system", action="append", help="one of the systems; can be repeated; by default all")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few cases; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    torch_device, simulated = torch_device_of(arguments.backend, arguments.device)
    if simulated:
        sys.exit(f"the device {arguments.device} of backend '{arguments.backend}' is simulated: it computes nothing")
    about = machine(("hardpoint", f"hardpoint-{arguments.backend}", "torch", "transformers", "triton", "numpy"))

    name = "tiny" if arguments.quick else "qwen3-0.6b"
    decoder, cases, systems = DECODERS[name], cases_of(arguments.quick), systems_of(torch_device)
    if arguments.system:
        names = [system.name for system in systems]
        if unknown := set(arguments.system) - set(names):
            parser.error(f"no system is called {', '.join(sorted(unknown))}; there are: {'; '.join(names)}")
        systems = [system for system in systems if system.name in arguments.system]
    runner = Runner(decoder, torch_device, arguments.seconds)
    model = REPOSITORY / "build" / "benchmarks" / name
    limit_size = (1 << 24, 256, 3) if arguments.quick else (4 << 30, 8192, 10)
    try:
        runner.checkpoint(model)
        before = runner.limits(*limit_size)
        common = {
            "model": str(model),
            "backend": arguments.backend,
            "device": arguments.device,
            "torch_device": torch_device,
            "max_model_len": max(case.length + case.output_tokens for case in cases),
            "max_num_seqs": max(case.prompts for case in cases),
            "max_num_batched_tokens": 64 if arguments.quick else TOKEN_BUDGET,
            "memory_utilization": None if torch_device == "cpu" else 0.85,
        }
        answers = {
            system.name: runner.run(system, common, cases, arguments.repeats, 1 / (len(systems) - index))
            for index, system in enumerate(systems)
        }
        after = runner.limits(*limit_size)
    except ChildFailed as error:
        sys.exit(str(error))
    limits = {key: max(before[key], after[key]) for key in before}
    held = torch_device != "cpu" and not arguments.quick
    found = verdicts(answers, cases, decoder, limits, held)

    print(command())
    print(
        f"{name} in bfloat16, {decoder.step_weight_bytes / 1e6:,.0f} MB of weights, on {torch_device};"
        f" copies {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s, matrix products {limits['matrix_operations_per_s'] / 1e12:,.1f} TFLOP/s;"
        f" medians of {arguments.repeats} runs.{'' if held else ' THE FIGURES MEAN NOTHING.'}\n"
    )
    print(table(["tokens/s", *answers], rows_of(answers, cases)))
    print(f"\n{verdict_table(found)}\n\n{equal_first_tokens(answers, cases)}")
    problems = failures(answers, cases)
    print("".join(f"\n{problem}" for problem in problems), end="\n" if problems else "")
    if arguments.json:
        result = {
            "command": command(),
            "simulated": False,
            "meaningful": held,
            "machine": about,
            "device": {"backend": arguments.backend, "index": arguments.device, "torch_device": torch_device},
            "decoder": asdict(decoder),
            "limits": {"best": limits, "before": before, "after": after},
            "systems": answers,
            "not_run": problems,
            "verdicts": [verdict.as_dict() for verdict in found],
        }
        write_json(arguments.json, result)
    ours_failed = any(problem.startswith("hardpoint") for problem in problems)
    if ours_failed or any(verdict.met is False for verdict in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
