"""Quantised weights multiplied as stored: speed, memory and perplexity beside llama.cpp with the same file, and beside our own bf16.

    python benchmarks/quantized.py [--parts speed,perplexity] [--models demo,qwen3-q4_1,qwen3-q8_0] [--rounds 7] [--threads 2]
                                   [--tokens 20480] [--quick] [--json benchmarks/results/quantized.json]

`demo` is the packaged file, matrices in Q4_1 and the embedding in Q8_0; the others are GGUF files of Qwen3-0.6B's shape with random
numbers in one format. Speed: each configuration is loaded once, in a process of its own, and they take turns at every measurement, in an
order that is reversed in each round; one that waits is stopped (SIGSTOP). Medians are quoted, and the median of each round's ratios; see
`benchmarks/README.md`. The read bandwidth is measured before and after each measurement of one stream as stored; what its steps read
(weights, and the keys and values before a token in its middle) is held against it. Then the demo model is started as stored in a fresh
process seven times. Perplexity: of Python's own help texts in chunks of 512 tokens, of which the second halves are scored, as
llama.cpp's tool does; beside the same file expanded to float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from bandwidth import Reader
from child import ChildFailed, run_script
from cpu_engine import PEERS, Configuration, Outcome, make_workload, pin_to_cores

sys.path.insert(0, str(PEERS))
import export_demo
import random_gguf

PARTS = ("speed", "perplexity")
MODELS = ("demo", "qwen3-q4_1", "qwen3-q8_0")
_STREAMS, _CHUNK = 16, 512
_MAX_MODEL_LEN, _MAX_MIXED_LEN = 1024, 128
_LLAMA_CPP = "llama.cpp"
_AS_STORED = "hardpoint, as stored"
_RATES = {"single_stream_tokens_per_s": "1 stream (tok/s)", "mixed_tokens_per_s": f"{_STREAMS} streams (tok/s)"}
_TIMES = {
    "first_token_ms": "first token of 512 (ms)",
    "import_s": "import (s)",
    "load_s": "load (s)",
    "peak_rss_mb": "peak RSS (MB)",
}
# Of what we hold ourselves to: the metric, its bar beside llama.cpp, and whether more is better.
_BARS = (
    ("single_stream_tokens_per_s", 1.3, True),
    ("mixed_tokens_per_s", 3.0, True),
    ("first_token_ms", 0.6, False),
    ("peak_rss_mb", 1.2, False),
)
_SHARE_OF_BANDWIDTH = 0.75
_READY_S, _STARTS = 1.0, 7
_BANDWIDTH = "read_bandwidth_gb_per_s"
_NO_WORK: dict[str, Any] = {
    "warm_up": [],
    "first_token": {"prompts": []},
    "single_stream": {"prompt_pairs": [], "output_tokens": 0},
    "mixed": {},
}


def model_file(name: str) -> Path:
    """Return a model's GGUF file; random ones are written once into the benchmarks' cache."""
    if name == "demo":
        return export_demo.packaged_model()
    return random_gguf.written(export_demo.CACHE / f"{name}.gguf", name.rpartition("-")[2].upper())


def configurations(
    model: Path, threads: int, peers: Path, *, tokenizer: bool
) -> tuple[list[Configuration], dict[str, str]]:
    """Return what can be measured of a model, and why llama.cpp is missing where it is; random models have no `tokenizer`."""
    common: dict[str, Any] = {"threads": threads, "max_model_len": _MAX_MODEL_LEN, "max_num_seqs": _STREAMS}
    ours = {**common, "model": str(model), "tokenizer": tokenizer}
    here = Path(sys.executable)
    found = [
        Configuration(name, "hardpoint", here, "hardpoint_engine.py", {**ours, **settings})
        for name, settings in ((_AS_STORED, {"quantization": "gguf"}), ("hardpoint, bf16", {"quantization": "none"}))
    ]
    python = peers / "llamacpp" / "bin" / "python"
    if not python.exists():
        return found, {_LLAMA_CPP: "not installed in .peers/llamacpp; run `make peers`"}
    for flash_attention in (True, False):
        options = {
            **common,
            "model": str(model),
            "flash_attention": flash_attention,
            "kv_unified": False,
            "sequences": _STREAMS,
            "max_mixed_len": _MAX_MIXED_LEN,
        }
        name = _LLAMA_CPP + (", flash attention" if flash_attention else "")
        found.append(Configuration(name, _LLAMA_CPP, python, "llamacpp_engine.py", options))
    return found, {}


def streams_workload(vocab_size: int, quick: bool) -> dict[str, Any]:
    """Return `cpu_engine`'s workload with equal streams in the place of its mixed requests."""
    workload = make_workload(vocab_size, quick)
    prompts = [prompt[:32] for prompt in make_workload(vocab_size, False)["mixed"]["prompts"][:_STREAMS]]
    tokens = 16 if quick else 32
    workload["single_stream"]["output_tokens"] = 32 if quick else 64
    workload["mixed"] = {"prompts": prompts, "output_tokens": [tokens] * _STREAMS}
    workload["warm_up"][1] = {"prompts": prompts, "output_tokens": [4] * _STREAMS}
    return workload


class _Engine:
    """One configuration, loaded in a process of its own that is stopped while others are measured."""

    def __init__(self, configuration: Configuration, workload: dict[str, Any], scratch: Path, timeout_s: float) -> None:
        """Start it, warm it up and stop it; raises ChildFailed."""
        self._name, self._timeout_s = configuration.name, timeout_s
        job = scratch / "job.json"
        job.write_text(json.dumps({"options": configuration.options, "workload": workload, "serves": True}), "utf-8")
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [str(configuration.python), str(PEERS / configuration.script), str(job)],
            env={**os.environ, **configuration.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
        )
        try:
            self.start = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, metric: str) -> float:
        """Measure once; raises ChildFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{metric}\n")
        self._process.stdin.flush()
        value: float = self._answer()
        self._signal(signal.SIGSTOP)
        return value

    def finish(self) -> dict[str, Any]:
        """Return what the process says at its end; raises ChildFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        """End the process, whatever it does; idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._stderr.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._stderr.seek(0)
            end = "".join(f"\n    {text.rstrip()[:300]}" for text in self._stderr.readlines()[-6:])
            why = "ended" if ready else f"gave no answer in {self._timeout_s:.0f} s"
            raise ChildFailed(f"{self._name} {why}{end}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def measure_in_turn(
    found: Sequence[Configuration],
    workload: dict[str, Any],
    options: argparse.Namespace,
    scratch: Path,
    outcomes: dict[str, Outcome],
) -> None:
    """Load all configurations and measure them in turns; fills `outcomes`."""
    reader = Reader(options.threads)
    engines: dict[str, _Engine] = {}
    samples: dict[str, list[dict[str, Any]]] = {}

    def fail(name: str, error: ChildFailed) -> None:
        outcomes[name].failure = str(error)
        if name in engines:
            engines.pop(name).close()

    try:
        for configuration in found:
            name = configuration.name
            outcomes[name], samples[name] = Outcome(), []
            try:
                engines[name] = _Engine(configuration, workload, scratch, options.timeout)
            except ChildFailed as error:
                fail(name, error)
        for number in range(options.rounds):
            for name in engines:
                samples[name].append({})
            for metric in (*_RATES, "first_token_ms"):
                for name in list(engines) if number % 2 else list(engines)[::-1]:
                    of_stream = (name, metric) == (_AS_STORED, "single_stream_tokens_per_s")
                    limits = [reader.measure().gb_per_s] if of_stream else []
                    try:
                        samples[name][-1][metric] = engines[name].measure(metric)
                    except ChildFailed as error:
                        fail(name, error)
                        continue
                    if limits:
                        samples[name][-1][_BANDWIDTH] = report.median([*limits, reader.measure().gb_per_s])
        for name, engine in list(engines.items()):
            try:
                end = engine.finish()
            except ChildFailed as error:
                fail(name, error)
                continue
            outcomes[name].rounds = [{**end, **one} for one in samples[name]]
    finally:
        for engine in engines.values():
            engine.close()


def speed(name: str, options: argparse.Namespace, cpus: list[int], scratch: Path) -> dict[str, Any]:
    """Measure one model; prints its table and verdicts, and returns its part of the result file."""
    model = model_file(name)
    found, missing = configurations(model, len(cpus), options.peers_dir.resolve(), tokenizer=name == "demo")
    outcomes: dict[str, Outcome] = {}
    workload = streams_workload(random_gguf.VOCAB if name != "demo" else 49152, options.quick)
    measure_in_turn(found, workload, options, scratch, outcomes)
    bandwidth = outcomes[_AS_STORED].value(_BANDWIDTH)
    rows = []
    for one in found:
        outcome = outcomes[one.name]
        size = _bytes_read(outcome, workload)
        rate = outcome.value("single_stream_tokens_per_s")
        share = "" if size is None or rate is None or bandwidth is None else f"{rate * size / (bandwidth * 1e9):.0%}"
        rows.append([one.name, *(report.number(outcome.value(key)) for key in (*_RATES, *_TIMES)), share])
    print(f"{name}: {model.name}, {len(cpus)} threads; read bandwidth {report.number(bandwidth)} GB/s")
    print(report.table(["system", *_RATES.values(), *_TIMES.values(), "bytes read / bandwidth"], rows))
    starts = _starts(found[0], options, scratch) if name == "demo" and not outcomes[_AS_STORED].failure else []
    verdicts = _verdicts(found, outcomes, starts, workload)
    print(report.verdict_table(verdicts))
    for system, reason in missing.items():
        print(f"Missing: {system}: {reason}.")
    failures = {key: outcome.failure for key, outcome in outcomes.items() if outcome.failure}
    for system, failure in failures.items():
        print(f"Failed: {system}: {failure}")
    return {
        "file_bytes": model.stat().st_size,
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "starts_s": starts,
        "missing": missing,
        "failures": failures,
        "rounds": {
            key: [{field: value for field, value in one.items() if field != "mixed_first_tokens"} for one in of.rounds]
            for key, of in outcomes.items()
        },
    }


def _starts(configuration: Configuration, options: argparse.Namespace, scratch: Path) -> list[float]:
    """Return seconds from import to ready in fresh processes that do nothing else."""
    seconds = []
    for _ in range(1 if options.quick else _STARTS):
        with contextlib.closing(_Engine(configuration, _NO_WORK, scratch, options.timeout)) as engine:
            seconds.append(engine.start["import_s"] + engine.start["load_s"])
    return seconds


def _paired(ours: Outcome, other: Outcome, key: str, other_key: str | None = None) -> float | None:
    """Return the median of each round's ratio; None where a round of either is missing."""
    if not ours.rounds or len(ours.rounds) != len(other.rounds):
        return None
    return report.median(
        [mine[key] / theirs[other_key or key] for mine, theirs in zip(ours.rounds, other.rounds, strict=True)]
    )


def _bytes_read(outcome: Outcome, workload: dict[str, Any]) -> float | None:
    """Return the bytes that one stream's step reads at least, in the middle of it: all matrices once, and the keys and values before it."""
    details = outcome.rounds[0]["details"] if outcome.rounds else {}
    if "weight_bytes" not in details:
        return None
    stream = workload["single_stream"]
    context = len(stream["prompt_pairs"][0][0]) + stream["output_tokens"] / 2
    return float(details["weight_bytes"] + context * details["kv_bytes_per_token"])


def _verdicts(
    found: list[Configuration], outcomes: dict[str, Outcome], starts: list[float], workload: dict[str, Any]
) -> list[report.Verdict]:
    ours = outcomes.get(_AS_STORED, Outcome())
    peers = [outcomes[one.name] for one in found if one.system == _LLAMA_CPP]
    labels = _RATES | _TIMES
    verdicts = []
    for key, factor, higher in _BARS:
        ratios = [(ratio, peer) for peer in peers if (ratio := _paired(ours, peer, key)) is not None]
        # Beside the configuration that is best for this metric.
        ratio, best = (min if higher else max)(ratios, key=lambda pair: pair[0], default=(None, Outcome()))
        met = None if ratio is None else ratio >= factor if higher else ratio <= factor
        bar = f"{'≥' if higher else '≤'} {factor} × llama.cpp's best"
        verdicts.append(report.Verdict(labels[key], ours.value(key), best.value(key), _LLAMA_CPP, bar, met, ratio))
    plain = outcomes.get("hardpoint, bf16", Outcome())
    verdicts += [
        report.Verdict(
            label, ours.value(key), plain.value(key), "hardpoint, bf16", None, None, _paired(ours, plain, key)
        )
        for key, label in labels.items()
    ]
    size = _bytes_read(ours, workload)
    if size is not None:
        gigabytes = size / 1e9
        rate, limit = ours.value("single_stream_tokens_per_s"), ours.value(_BANDWIDTH)
        share = _paired(ours, ours, "single_stream_tokens_per_s", _BANDWIDTH)
        assert rate is not None
        assert share is not None
        share *= gigabytes
        met = share >= _SHARE_OF_BANDWIDTH
        verdicts.append(
            report.Verdict("1 stream (GB/s read)", rate * gigabytes, limit, "read bandwidth", "≥ 75 %", met, share)
        )
    if starts:
        ready = report.median(starts)
        verdicts.append(
            report.Verdict("import to ready (s)", ready, _READY_S, "limit", f"≤ {_READY_S} s", ready <= _READY_S)
        )
    return verdicts


def perplexity(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the demo model's perplexities; prints a table, and returns its part of the result file."""
    job = {"model": str(model_file("demo")), "tokens": options.tokens, "chunk": _CHUNK, "threads": options.threads}
    here = Path(sys.executable)
    runs: dict[str, tuple[Path, dict[str, Any]]] = {
        "expanded to float32": (here, {"quantization": "none", "dtype": "float32"}),
        "as stored, activations in float32": (here, {"quantization": "gguf", "dtype": "float32"}),
        "as stored, activations in bf16": (here, {"quantization": "gguf", "dtype": "bfloat16"}),
        _LLAMA_CPP: (options.peers_dir.resolve() / "llamacpp" / "bin" / "python", {}),
    }
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hardpoint-bench-") as folder:
        file = Path(folder) / "job.json"
        for name, (python, settings) in runs.items():
            if not python.exists():
                print(f"Missing: {name}: not installed in .peers/llamacpp; run `make peers`.")
                continue
            # llama.cpp's environment has no tokenizer of ours: it gets the first run's tokens.
            tokens = next(iter(answers.values()), {}).get("token_ids")
            file.write_text(json.dumps({**job, **settings, "token_ids": tokens}), encoding="utf-8")
            script = "llamacpp_perplexity.py" if name == _LLAMA_CPP else "hardpoint_perplexity.py"
            answers[name] = run_script(python, PEERS / script, [str(file)], timeout_s=options.timeout)
    exact = answers["expanded to float32"]["mean_log_probability"]
    theirs = answers.get(_LLAMA_CPP, {}).get("mean_log_probability")
    rows = []
    for name, answer in answers.items():
        mean = answer["mean_log_probability"]
        beside = "" if theirs is None else f"{math.expm1(theirs - mean):+.3%}"
        rows.append([name, f"{math.exp(-mean):.4f}", f"{math.expm1(exact - mean):+.3%}", beside])
    count = answers["expanded to float32"]["scored"]
    print(f"Perplexity of the demo model, {count:,} scored tokens of {options.tokens:,} in chunks of {_CHUNK}")
    print(report.table(["weights", "perplexity", "beside float32 (bar 0.1 %)", "beside llama.cpp (bar 0.5 %)"], rows))
    return {name: {key: value for key, value in one.items() if key != "token_ids"} for name, one in answers.items()}


def main() -> int:
    """Measure, print the tables, write the file; 1 where a process failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default all)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)} (default all)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; medians are quoted (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="threads and processors of every system (default 2)")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens of the text (default 20480)")
    parser.add_argument("--quick", action="store_true", help="one round, few tokens: a check, not a result")
    parser.add_argument("--json", metavar="FILE", help="also write the raw rounds and the machine's description")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds per process (default 1200)")
    parser.add_argument("--peers-dir", type=Path, default=report.REPOSITORY / ".peers", help="made by `make peers`")
    options = parser.parse_args()
    parts, models = options.parts.split(","), options.models.split(",")
    if set(parts) - set(PARTS) or set(models) - set(MODELS):
        parser.error(f"parts are of {', '.join(PARTS)}, models of {', '.join(MODELS)}")
    if options.quick:
        options.rounds, options.tokens = 1, 2 * _CHUNK
    # Engines are in groups of their own, and are closed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = report.machine(["hardpoint", "hardpoint-cpu", "torch", "gguf"])
    cpus = pin_to_cores(options.threads)
    result: dict[str, Any] = {
        "benchmark": "quantized",
        "command": report.command(),
        "quick": options.quick,
        "machine": machine,
        "read_bandwidth_reader": Reader(options.threads).name,
    }
    failed = False
    if options.quick:
        print("QUICK: one round of a small workload, not a result to quote.")
    with tempfile.TemporaryDirectory(prefix="hardpoint-bench-") as folder:
        if "speed" in parts:
            result["speed"] = {name: speed(name, options, cpus, Path(folder)) for name in models}
            failed = any(one["failures"] for one in result["speed"].values())
    if "perplexity" in parts:
        try:
            result["perplexity"] = perplexity(options)
        except ChildFailed as error:
            print(f"Failed: {error}", file=sys.stderr)
            failed = True
    print(f"Reproduce: {result['command']}")
    if options.json:
        report.write_json(options.json, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
