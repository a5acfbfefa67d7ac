"""`hardpoint bench`: throughput and latency of an engine on random prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from hardpoint.cli.options import EngineOptions, takes
from hardpoint.cli.session import describe
from hardpoint.validation import INT32_MAX

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.outputs import RequestOutput
    from hardpoint.sampling import SamplingParams

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Measure an engine on prompts of random tokens, which share no prefix."""


@dataclass(frozen=True)
class LengthRange:
    """Numbers of tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Read "128" or "32:256"; raises typer.BadParameter."""
        low, colon, high = text.partition(":")
        try:
            result = cls(int(low), int(high if colon else low))
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is neither a number nor a range like 32:256") from error
        if not 1 <= result.low <= result.high <= INT32_MAX:
            raise typer.BadParameter(f"{text!r} is not a rising range of at least 1, at most {INT32_MAX}")
        return result

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths, uniform over the range."""
        return [int(length) for length in generator.integers(self.low, self.high + 1, count)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


_Temperature = Annotated[float, typer.Option(help="0 takes the most probable token.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of lengths, prompts and sampling.")]
_IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos/--stop-at-eos", help="Generate the whole output length, or stop at end of text.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@takes(engine=EngineOptions)
def throughput(
    *,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all queued at the start.")] = 64,
    input_len: Annotated[
        LengthRange, typer.Option(parser=LengthRange.parse, metavar="N|LOW:HIGH", help="Tokens per prompt.")
    ] = "32:256",  # type: ignore[assignment]  # typer parses defaults too
    output_len: Annotated[
        LengthRange, typer.Option(parser=LengthRange.parse, metavar="N|LOW:HIGH", help="Most tokens per completion.")
    ] = "64:128",  # type: ignore[assignment]
    warmup: Annotated[int, typer.Option(min=0, help="Requests run before, not counted.")] = 2,
    temperature: _Temperature = 0.0,
    ignore_eos: _IgnoreEos = True,
    seed: _Seed = 0,
    as_json: _Json = False,
    engine: EngineOptions,
) -> None:
    """Run many requests at once; report tokens per second, time to first token (TTFT) and time per output token (TPOT).

    Times count from the start, so TTFT holds the time that a request waits for others.
    """
    generator = np.random.default_rng(seed)
    with engine.open() as llm:
        _run(llm, *_requests(llm, generator, input_len, output_len, warmup, temperature, ignore_eos))
        prompts, params = _requests(llm, generator, input_len, output_len, num_prompts, temperature, ignore_eos)
        before = llm.stats()
        start = time.perf_counter()
        outputs = _run(llm, prompts, params, show_progress=not as_json and sys.stderr.isatty())
        seconds = time.perf_counter() - start
        after = llm.stats()
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    report = {
        **describe(llm.info),
        "benchmark": "throughput",
        "settings": {
            "num_prompts": num_prompts,
            "input_len": str(input_len),
            "output_len": str(output_len),
            "warmup": warmup,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "seed": seed,
        },
        "load_seconds": llm.info.load_seconds,
        "elapsed_seconds": seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "requests_per_second": num_prompts / seconds,
        "input_tokens_per_second": num_input / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_input + num_output) / seconds,
        "preemptions": after.preemptions - before.preemptions,
        "steps": after.steps - before.steps,
        **_latencies(outputs),
    }
    _show(report, as_json, f"throughput: {num_prompts} requests, input {input_len}, output {output_len} tokens")


@app.command()
@takes(engine=EngineOptions)
def latency(
    *,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Most tokens per completion.")] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="Measured runs, each with new prompts.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before, not counted.")] = 1,
    temperature: _Temperature = 0.0,
    ignore_eos: _IgnoreEos = True,
    seed: _Seed = 0,
    as_json: _Json = False,
    engine: EngineOptions,
) -> None:
    """Run one batch after another; report end-to-end seconds, time to first token (TTFT) and time per output token (TPOT)."""
    generator = np.random.default_rng(seed)
    lengths = LengthRange(input_len, input_len), LengthRange(output_len, output_len)
    seconds: list[float] = []
    outputs: list[RequestOutput] = []
    with engine.open() as llm:
        for iteration in range(warmup + iterations):
            requests = _requests(llm, generator, *lengths, batch_size, temperature, ignore_eos)
            start = time.perf_counter()
            done = _run(llm, *requests)
            if iteration >= warmup:
                seconds.append(time.perf_counter() - start)
                outputs += done
    report = {
        **describe(llm.info),
        "benchmark": "latency",
        "settings": {
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "iterations": iterations,
            "warmup": warmup,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "seed": seed,
        },
        "load_seconds": llm.info.load_seconds,
        "end_to_end_seconds": percentiles(seconds),
        **_latencies(outputs),
    }
    _show(report, as_json, f"latency: batch {batch_size}, input {input_len}, output {output_len} tokens")


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile, least and greatest; None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99, "min": min(values), "max": max(values)}


def _requests(
    llm: LLM,
    generator: np.random.Generator,
    input_len: LengthRange,
    output_len: LengthRange,
    count: int,
    temperature: float,
    ignore_eos: bool,
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of random ordinary tokens, and parameters."""
    from hardpoint import SamplingParams
    from hardpoint.interfaces.errors import ConfigError

    longest = input_len.high + output_len.high
    if longest > llm.info.max_model_len:
        raise ConfigError(
            f"prompts and outputs of up to {longest} tokens are asked for",
            found=f"the context is {llm.info.max_model_len} tokens",
            hint="Lower --input-len or --output-len, or raise --max-model-len",
        )
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer, so ordinary tokens are not known", hint="Add its tokenizer files"
        )
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.all_special_ids)
    prompts = [generator.choice(ordinary, length).tolist() for length in input_len.draw(generator, count)]
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=ignore_eos, seed=number)
        for number, length in enumerate(output_len.draw(generator, count))
    ]
    return prompts, params


def _run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, show_progress: bool = False
) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=show_progress) if prompts else []


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return percentiles of TTFT and TPOT in seconds; TPOT is the mean over a request's tokens after the first."""
    metrics = [(output.metrics, len(output.outputs[0].token_ids)) for output in outputs if output.metrics is not None]
    first = [one.time_to_first_token for one, _ in metrics if one.time_to_first_token is not None]
    each = [one.decode_time / (count - 1) for one, count in metrics if one.decode_time is not None and count > 1]
    return {"ttft_seconds": percentiles(first), "tpot_seconds": percentiles(each)}


def _show(report: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console(highlight=False)
    backend = report["backend"]
    simulated = ", simulated" if backend["simulated"] else ""
    console.print(
        f"{title}; {report['model']['name']} on {backend['name']} ({backend['device']}{simulated})", markup=False
    )
    table = Table(box=None)
    for column in ("", "value", "unit"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, unit in _VALUES.items():
        if key in report:
            table.add_row(key.replace("_", " "), f"{report[key]:,.2f}", unit)
    console.print(table)
    spread = Table(box=None)
    for column in ("milliseconds", "mean", "p50", "p90", "p99", "min", "max"):
        spread.add_column(column, justify="left" if column == "milliseconds" else "right")
    for key, name in _SPREADS.items():
        if report.get(key) is not None:
            spread.add_row(name, *(f"{value * 1e3:,.1f}" for value in report[key].values()))
    console.print(spread)


_VALUES = {
    "load_seconds": "s",
    "elapsed_seconds": "s",
    "requests_per_second": "1/s",
    "input_tokens_per_second": "tokens/s",
    "output_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s",
}
_SPREADS = {
    "end_to_end_seconds": "end to end",
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
}
