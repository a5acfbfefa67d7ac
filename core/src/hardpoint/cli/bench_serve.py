"""`hardpoint bench serve`: load on a server of OpenAI's interface."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console

from hardpoint.bench.sending import Sent, send
from hardpoint.bench.statistics import Objective, summary
from hardpoint.bench.workload import Lengths, arrivals, random_asks, read_asks
from hardpoint.cli import interrupts
from hardpoint.cli.bench_parts import lengths, show
from hardpoint.cli.exit_codes import ExitCode
from hardpoint.interfaces.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.bench.client import Client

_BUSY_CLIENT = 0.8
"""Share of one processor from which on the client may hold the server up."""


class Api(StrEnum):
    """What is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"


def _objective(text: str) -> Objective:
    try:
        return Objective.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def serve(
    *,
    base_url: Annotated[
        str, typer.Option(help="Of the server, as OpenAI's clients take it.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Without it, the first that is listed.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent with each request.")] = None,
    api: Annotated[Api, typer.Option(help="What is asked for.")] = Api.COMPLETIONS,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests that are counted.")] = 100,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, one after another, not counted.")] = 1,
    request_rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Requests per second, with random gaps; without it, or with inf, all at once."),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, max=1e6, help="Of the gaps: 1 is Poisson's, less is burstier, more is more even.")
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests in progress; further ones wait.")
    ] = None,
    input_len: Annotated[
        Lengths,
        typer.Option(
            parser=lengths,
            metavar="N|LOW:HIGH|lognormal:MEDIAN:SIGMA:MOST",
            help="Tokens per prompt, drawn at random; for chat, words of about one token each.",
        ),
    ] = "32:256",  # type: ignore[assignment]  # typer parses defaults too
    output_len: Annotated[
        Lengths,
        typer.Option(parser=lengths, metavar="N|LOW:HIGH|lognormal:MEDIAN:SIGMA:MOST", help="Most tokens per answer."),
    ] = "64:128",  # type: ignore[assignment]
    dataset: Annotated[
        Path | None,
        typer.Option(help='Prompts instead: a file whose lines are {"prompt": ...} or {"messages": ...}.'),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Ask for the whole output length (a field that OpenAI's own servers refuse), or stop at end of text.",
        ),
    ] = True,
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of each request.")] = None,
    timeout: Annotated[float | None, typer.Option(min=1e-3, help="Seconds that a request may take.")] = None,
    goodput: Annotated[
        list[Objective] | None,
        typer.Option(
            parser=_objective,
            metavar="NAME:MS",
            help="Count the requests that meet this: ttft, itl (every gap), tpot or e2e, in ms; repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts, gaps and sampling.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distributions of the times: a file .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send requests to a server of OpenAI's interface, as streams; report rates and percentiles of its times.

    Ctrl-C ends the run and prints what there is. The exit code is 1 where a request failed.
    """
    objectives = goodput or []
    if len({objective.name for objective in objectives}) < len(objectives):
        raise typer.BadParameter("a time is given twice", param_hint="--goodput")
    if request_rate == math.inf:
        request_rate = None
    draw = _draw_plot(plot)
    fields = {"temperature": temperature, "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"ignore_eos": True} if ignore_eos else {}
    fields |= _object(extra_body)
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise typer.BadParameter(
            f"JSON has neither infinity nor NaN: {fields}", param_hint="--temperature, --extra-body"
        ) from error
    generator = np.random.default_rng(seed)
    chat, count = api is Api.CHAT, num_requests + warmup
    asks = (
        random_asks(generator, count, input_len, output_len, chat=chat)
        if dataset is None
        else read_asks(dataset, generator, count, output_len, chat=chat)
    )
    offsets = arrivals(generator, num_requests, request_rate, burstiness)
    try:
        from hardpoint.bench.client import Client
    except ImportError as error:
        raise _missing(error) from error

    async def whole() -> tuple[str, Sent]:
        async with Client(base_url, chat=chat, key=api_key, timeout=timeout) as client:
            name = model or await client.model()
            bodies = [json.dumps({"model": name} | ask | fields).encode() for ask in asks]
            return name, await _measured(client, bodies[:warmup], bodies[warmup:], offsets, concurrency)

    interrupts.raise_from_here()
    name, sent = _run(whole())
    report = {
        "benchmark": "serve",
        "settings": {
            "base_url": base_url,
            "model": name,
            "api": str(api),
            "num_requests": num_requests,
            "warmup": warmup,
            "request_rate": request_rate,
            "burstiness": burstiness,
            "concurrency": concurrency,
            "input_len": str(input_len),
            "output_len": str(output_len),
            "dataset": None if dataset is None else str(dataset),
            "seed": seed,
            "fields": fields,
        },
        **summary(sent, objectives),
    }
    how = "all at once" if request_rate is None else f"{request_rate:g} a second"
    title = f"{num_requests} requests to {name} at {base_url}, {how}"
    show(report, as_json, title)
    _tell_more(report, quiet=as_json)
    if plot is not None and draw is not None:
        try:
            draw(plot, sent.answers, objectives, title)
        except OSError as error:
            raise ConfigError(f"the plot '{plot}' cannot be written", found=str(error)) from error
    if sent.unfinished:
        raise KeyboardInterrupt
    if report["failed"]:
        raise typer.Exit(ExitCode.FAILED)


async def _measured(
    client: Client, before: Sequence[bytes], bodies: Sequence[bytes], offsets: Sequence[float], concurrency: int | None
) -> Sent:
    """Warm up and send; the first Ctrl-C from here on ends the run, a second one the process."""
    for body in before:
        answer = await client.ask(body)
        if answer.error is not None:
            raise ConfigError(
                "a request of the warm-up failed", found=f"{answer.error}: {answer.detail}", hint="Nothing was measured"
            )
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    if interrupts.are_taken():
        loop.add_signal_handler(signal.SIGINT, end)
    return await send(client, bodies, offsets, concurrency, stop)


def _run(main: Any) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--extra-body") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return found


def _draw_plot(path: Path | None) -> Any:
    """Return what draws, before anything is measured; raises typer.BadParameter, ConfigError."""
    if path is None:
        return None
    try:
        from hardpoint.bench.plot import SUFFIXES, save
    except ImportError as error:
        raise _missing(error) from error
    if path.suffix not in SUFFIXES or not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(
            f"'{path}' is not a file {', '.join(SUFFIXES)} in a folder that can be written to", param_hint="--plot"
        )
    return save


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        "the packages of this benchmark are not installed", found=str(error), hint="Install the extra: hardpoint[bench]"
    )


def _tell_more(report: dict[str, Any], *, quiet: bool) -> None:
    """Print goodput and failures as text, and a warning where the client was as busy as what it measures."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if report["client_processor_share"] > _BUSY_CLIENT:
        share = report["client_processor_share"]
        console.print(f"warning: this client took {share:.0%} of a processor, so its times may be its own")
    if report["uncounted"]:
        console.print(
            f"warning: the server did not count the tokens of {report['uncounted']} answers: their parts with text count as output tokens, "
            "and their prompts are not in the totals"
        )
    if quiet:
        return
    out = Console(highlight=False, soft_wrap=True)
    if "goodput" in report:
        good, total = report["goodput"], report["requests"]
        out.print(f"goodput: {good['requests_per_second']:.2f} requests/s ({good['good_requests']} of {total})")
    for kind, number in report["errors"].items():
        out.print(f"{number} failed, {kind}: {report['error_examples'][kind]}", markup=False)
    if report["unfinished"]:
        out.print(f"{report['unfinished']} were not finished")
