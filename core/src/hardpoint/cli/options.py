"""Options that several commands share, each written once."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hardpoint.cli import interrupts
from hardpoint.cli.collection import nothing_collected

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM

_ENGINE = "Engine"
_SAMPLING = "Sampling"
_QUANTIZATION_HELP = (
    "Quantised weights: auto (multiplied as stored where the backend does so), gguf (likewise, or refused) or none (expanded). Dense ones: "
    "int8 or int4 (rounded, in groups of 32), int8-128 or int4-128 (of 128)."
)

MODEL_HELP = "'demo', a folder with a model, a GGUF file, or a hub id: ORG/NAME, ORG/NAME@REVISION, ORG/NAME:FILE.gguf."


@dataclass(frozen=True, kw_only=True)
class ServedEngineOptions:
    """The engine of each model that a command serves."""

    backend: Annotated[
        str | None,
        typer.Option(help="Backend by name; without it, the best one that is available.", rich_help_panel=_ENGINE),
    ] = None
    require_accelerator: Annotated[
        bool, typer.Option("--require-accelerator", help="Fail rather than run on the CPU.", rich_help_panel=_ENGINE)
    ] = False
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)] = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context in tokens.", rich_help_panel=_ENGINE)
    ] = None
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most sequences computed at a time.", rich_help_panel=_ENGINE)
    ] = 256
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens computed in one step.", rich_help_panel=_ENGINE)
    ] = 2048
    mixed_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most prompt tokens computed in one step while sequences decode: fewer make shorter gaps between tokens.",
            show_default="what takes about 0.2 s",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help="fcfs (by arrival), priority (by the requests' priority), or shortest (short prompts of a burst go first).",
            rich_help_panel=_ENGINE,
        ),
    ] = "fcfs"
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per KV block.", rich_help_panel=_ENGINE)] = None
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; without it, what fits.", rich_help_panel=_ENGINE)
    ] = None
    memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the device's memory to use.", rich_help_panel=_ENGINE)
    ] = None
    prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV blocks of equal prompt beginnings.", rich_help_panel=_ENGINE)
    ] = True
    kv_offload_gib: Annotated[
        float,
        typer.Option(
            min=0.0, help="GiB of host memory for KV blocks that the prefix cache evicts.", rich_help_panel=_ENGINE
        ),
    ] = 0.0
    kv_offload_disk_gib: Annotated[
        float,
        typer.Option(min=0.0, help="GiB on disk for those that this memory evicts.", rich_help_panel=_ENGINE),
    ] = 0.0
    kv_offload_path: Annotated[
        str | None, typer.Option(help="Folder for them.", show_default="none", rich_help_panel=_ENGINE)
    ] = None
    download_dir: Annotated[
        str | None,
        typer.Option(help="Where models are fetched to.", show_default="Hugging Face's cache", rich_help_panel=_ENGINE),
    ] = None
    load_format: Annotated[
        str, typer.Option(help="auto, safetensors, gguf, or dummy (random weights).", rich_help_panel=_ENGINE)
    ] = "auto"
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling where not given: auto (the model's generation_config.json), vllm (the engine's own), or a path.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    runner: Annotated[
        str, typer.Option(help="What the model is for: auto, generate or pooling.", rich_help_panel=_ENGINE)
    ] = "auto"
    convert: Annotated[
        str, typer.Option(help="Another head: auto, none, embed or classify.", rich_help_panel=_ENGINE)
    ] = "auto"
    hf_overrides: Annotated[
        str | None,
        typer.Option(help="A JSON object: values of the model's configuration.", rich_help_panel=_ENGINE),
    ] = None
    quantization: Annotated[str, typer.Option(help=_QUANTIZATION_HELP, rich_help_panel=_ENGINE)] = "auto"
    threads: Annotated[int | None, typer.Option(min=1, help="Host threads for computing.", rich_help_panel=_ENGINE)] = (
        None
    )
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that share each layer.", rich_help_panel=_ENGINE)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, help="Stages that the layers are divided into.", rich_help_panel=_ENGINE)
    ] = 1
    data_parallel_size: Annotated[
        int,
        typer.Option(min=1, help="Engines of the model, among which requests are shared out.", rich_help_panel=_ENGINE),
    ] = 1
    executor: Annotated[
        str, typer.Option(help="Where ranks run: auto, in_process, multi_process or ray.", rich_help_panel=_ENGINE)
    ] = "auto"
    limit_mm_per_prompt: Annotated[
        str | None,
        typer.Option(
            help='Most pictures of a prompt, as JSON: {"image": 2}.', show_default="999", rich_help_panel=_ENGINE
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None,
        typer.Option(
            help="Folder of which file: URLs may name pictures.", show_default="none", rich_help_panel=_ENGINE
        ),
    ] = None
    enable_prompt_embeds: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-embeds",
            help="Take prompts that are embeddings.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = False
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='Guess next tokens and verify several in a step, as JSON: {"method": "ngram"}, or {"model": "..."}.',
            show_default="none",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=_ENGINE)
    ] = False

    def settings(self) -> dict[str, Any]:
        """Return them under the names of `EngineConfig`."""
        settings = asdict(self)
        settings["num_device_blocks"] = settings.pop("num_blocks")
        settings["enable_prefix_caching"] = settings.pop("prefix_caching")
        settings["limit_mm_per_prompt"] = _json(settings["limit_mm_per_prompt"], "--limit-mm-per-prompt")
        settings["hf_overrides"] = _json(settings["hf_overrides"], "--hf-overrides")
        settings["speculative_config"] = _json(settings["speculative_config"], "--speculative-config")
        return settings


def _json(text: str | None, option: str) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint=option) from error


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ServedEngineOptions):
    """The engine that a command runs."""

    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)] = None
    model_option: Annotated[
        str | None, typer.Option("--model", "-m", help="The same as an option.", rich_help_panel=_ENGINE)
    ] = None
    engine_process: Annotated[
        bool,
        typer.Option("--engine-process", help="Run the engine in a process of its own.", rich_help_panel=_ENGINE),
    ] = False

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        given = [one for one in (settings["model"], settings.pop("model_option")) if one is not None]
        if len(given) != 1:
            raise typer.BadParameter("two models are given" if given else "a model is needed", param_hint="MODEL")
        return settings | {"model": given[0]}

    @contextmanager
    def open(self, **more: Any) -> Iterator[LLM]:
        """Load the engine, with a line on standard error while it loads (where that is a terminal), and shut it down in the end.

        Args:
            more: further settings of `EngineConfig`.

        Raises what `LLM` raises.
        """
        from rich.console import Console

        settings = self.settings()
        console = Console(stderr=True, soft_wrap=True)
        status = console.status(f"Loading {settings['model']}") if console.is_terminal else nullcontext()
        with status, nothing_collected():
            from hardpoint import LLM

            llm = LLM(**settings, **more)
        with interrupts.ended_by(llm.shutdown):
            yield llm


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; `SamplingParams` says what each means. What is not given is as the model's publisher recommends."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the most probable token.", show_default="the model's, or 0.7", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Smallest set of tokens with this mass.", rich_help_panel=_SAMPLING)
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Most probable tokens; 0 for all.", rich_help_panel=_SAMPLING)] = (
        None
    )
    min_p: Annotated[
        float | None, typer.Option(help="Least probability relative to the best.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens seen before.", rich_help_panel=_SAMPLING)
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same tokens.", rich_help_panel=_SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Text at which to stop; repeatable.", rich_help_panel=_SAMPLING)
    ] = None

    def given(self, **more: Any) -> dict[str, Any]:
        """Return those of these and further parameters that the user gave; raises InvalidSamplingParams."""
        from hardpoint import SamplingParams

        given = {name: value for name, value in (asdict(self) | more).items() if value is not None}
        SamplingParams(**given)
        return given


def takes(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of whole groups, which are dataclasses: its parameter of that name gets them as one object.

    Typer reads a command's options from its signature, so the decorated function has one in which each such parameter is
    replaced by the group's fields.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name not in groups]
        for group in groups.values():
            hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name]
                )
                for option in fields(group)
            ]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            made = {
                name: group(**{option.name: values.pop(option.name) for option in fields(group)})
                for name, group in groups.items()
            }
            function(**values, **made)

        del run.__wrapped__  # or its signature would be read instead
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
