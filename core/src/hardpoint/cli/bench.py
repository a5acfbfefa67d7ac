"""`hardpoint bench`: throughput and latency of an engine on random prompts; of a server, see `bench_serve`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from hardpoint.bench.statistics import percentiles
from hardpoint.bench.workload import Lengths
from hardpoint.cli.bench_parts import lengths, show
from hardpoint.cli.bench_serve import serve
from hardpoint.cli.options import EngineOptions, takes
from hardpoint.cli.session import describe

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.outputs import RequestOutput
    from hardpoint.sampling import SamplingParams

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Measure an engine on prompts of random tokens, which share no prefix, or a server."""


app.command("serve")(serve)


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
        Lengths, typer.Option(parser=lengths, metavar="N|LOW:HIGH", help="Tokens per prompt.")
    ] = "32:256",  # type: ignore[assignment]  # typer parses defaults too
    output_len: Annotated[
        Lengths, typer.Option(parser=lengths, metavar="N|LOW:HIGH", help="Most tokens per completion.")
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
    exactly = Lengths(input_len, input_len), Lengths(output_len, output_len)
    seconds: list[float] = []
    outputs: list[RequestOutput] = []
    with engine.open() as llm:
        for iteration in range(warmup + iterations):
            requests = _requests(llm, generator, *exactly, batch_size, temperature, ignore_eos)
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


def _requests(
    llm: LLM,
    generator: np.random.Generator,
    input_len: Lengths,
    output_len: Lengths,
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
    backend = report["backend"]
    simulated = ", simulated" if backend["simulated"] else ""
    show(report, as_json, f"{title}; {report['model']['name']} on {backend['name']} ({backend['device']}{simulated})")
