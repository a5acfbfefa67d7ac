"""`hardpoint generate`: completions of prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hardpoint.cli.options import EngineOptions, SamplingOptions, takes
from hardpoint.cli.session import (
    backend_name,
    describe,
    prefix_cache,
    sampling_params,
    show_formats,
    show_rate,
    stream,
    timings,
)

if TYPE_CHECKING:
    from hardpoint.engine.inputs import TokenizedPrompt
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.outputs import CompletionOutput, RequestOutput
    from hardpoint.sampling import SamplingParams


@takes(sampling=SamplingOptions, engine=EngineOptions)
def generate(
    *,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help='One prompt per line, or with the suffix .jsonl one object with "prompt" per line.',
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Write each prompt as a user's message with the model's chat template, or pass it as it is.",
            show_default="--chat where the model has a template",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before each prompt; needs a template.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens per completion.", show_default="the model's, or 128")
    ] = None,
    n: Annotated[int, typer.Option(help="Completions per prompt.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Log probabilities of this many tokens (in JSON).")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate beyond the end of text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Complete prompts and print the completions.

    Prompts come from --prompt, from --prompts-file, or from standard input, which is one prompt as a whole. Completions go to
    standard output and everything else to standard error.
    """
    prompts = _prompts(prompt, prompts_file)
    given = sampling.given(max_tokens=max_tokens, n=n, logprobs=logprobs, ignore_eos=ignore_eos)
    with engine.open() as llm:
        params = sampling_params(llm, given, max_tokens=128)
        tokenized = [_tokenize(llm, text, chat, system) for text in prompts]
        start = time.perf_counter()
        if as_json or len(prompts) > 1 or n > 1:
            outputs = llm.generate(
                [{"prompt_token_ids": one.token_ids} for one in tokenized],
                params,
                use_tqdm=len(prompts) > 1 and sys.stderr.isatty(),
            )
            if as_json:
                typer.echo(json.dumps(_report(llm, prompts, outputs, time.perf_counter() - start), ensure_ascii=False))
                return
            _print(prompts, outputs)
        else:
            _print_as_it_comes(llm, tokenized[0], params)
        _print_summary(llm)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    if given and file is not None:
        raise typer.BadParameter("give either --prompt or --prompts-file", param_hint="--prompts-file")
    if given:
        return given
    if file is not None:
        prompts = _read_prompts(file)
        if not prompts:
            raise typer.BadParameter(f"'{file}' has no prompts", param_hint="--prompts-file")
        return prompts
    if sys.stdin.isatty():
        raise typer.BadParameter("give --prompt, --prompts-file, or a prompt on standard input", param_hint="--prompt")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise typer.BadParameter("standard input is empty; give --prompt or --prompts-file", param_hint="--prompt")
    return [text]


def _read_prompts(file: Path) -> list[str]:
    try:
        # Editors may begin a file with a byte order mark, which is not of the first prompt.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"'{file}' is not UTF-8 text: {error}", param_hint="--prompts-file") from error
    lines = [line.removesuffix("\r") for line in lines]
    if file.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    return [_json_prompt(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _json_prompt(file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"'{file}' line {number} is not JSON: {error}", param_hint="--prompts-file") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise typer.BadParameter(
            f"""'{file}' line {number} is not an object with a text "prompt\"""", param_hint="--prompts-file"
        )
    return prompt


def _tokenize(llm: LLM, text: str, chat: bool | None, system: str | None) -> TokenizedPrompt:
    tokenizer = llm.get_tokenizer()
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    if chat or (chat is None and (has_template or system is not None)):
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return llm.engine.process_chat(messages)
    if system is not None:
        raise typer.BadParameter("a system message needs the chat template; leave out --raw", param_hint="--system")
    return llm.engine.process(text)


def _print_as_it_comes(llm: LLM, prompt: TokenizedPrompt, params: SamplingParams) -> None:
    for output in stream(llm, prompt, params):
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _print(prompts: list[str], outputs: list[RequestOutput]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if len(prompts) > 1 or len(output.outputs) > 1:
                number = f" [{completion.index}]" if len(output.outputs) > 1 else ""
                console.print(Text(f"> {prompt}{number}", "bold"))
            console.print(Text(completion.text))


def _print_summary(llm: LLM) -> None:
    stats, info = llm.stats(), llm.info
    line = (
        f"{info.model} on {backend_name(info)}: {show_formats(info)}load {info.load_seconds:.1f} s, "
        f"prefill {show_rate(stats.prefill_tokens, stats.prefill_seconds)}, "
        f"decode {show_rate(stats.decode_tokens, stats.decode_seconds)}"
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(line, "dim"))


def _report(llm: LLM, prompts: list[str], outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
    stats = llm.stats()
    return {
        **describe(llm.info),
        "outputs": [
            {
                "prompt": prompt,
                "prompt_token_ids": list(output.prompt_token_ids),
                "num_cached_tokens": output.num_cached_tokens,
                "time_to_first_token": None if output.metrics is None else output.metrics.time_to_first_token,
                "completions": [_completion(completion) for completion in output.outputs],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "timings": timings(llm.info, stats) | {"total_seconds": seconds},
        "prefix_cache": prefix_cache(stats),
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    result = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        result["cumulative_logprob"] = completion.cumulative_logprob
        result["logprobs"] = [
            [
                {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank, "text": entry.decoded_token}
                for token_id, entry in position.items()
            ]
            for position in completion.logprobs
        ]
    return result
