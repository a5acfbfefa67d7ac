"""What commands do with a running engine: stream an answer, and say what it took."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.engine.info import EngineInfo
    from hardpoint.engine.inputs import TokenizedPrompt
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.llm_engine import EngineStats
    from hardpoint.engine.outputs import RequestOutput
    from hardpoint.sampling import SamplingParams

_TEMPERATURE = 0.7
_request_numbers = itertools.count()


class Interrupt:
    """Whether Ctrl-C was pressed since the answer began."""

    def __init__(self) -> None:
        self.pressed = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a flag, so that a step is never broken off half done; the second one is the usual exception."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def sampling_params(llm: LLM, given: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Return what the user gave, over what the model's publisher recommends; raises InvalidSamplingParams.

    Where the publisher recommends nothing, the temperature is 0.7.

    Args:
        max_tokens: where neither says it.
    """
    from hardpoint.sampling import SamplingParams

    recommended = llm.get_default_sampling_params()
    if recommended == SamplingParams():
        recommended = recommended.clone(temperature=_TEMPERATURE)
    if recommended.max_tokens == SamplingParams().max_tokens:
        recommended = recommended.clone(max_tokens=max_tokens)
    return recommended.clone(**given)


def stream(llm: LLM, prompt: TokenizedPrompt, params: SamplingParams) -> Generator[RequestOutput]:
    """Run one prompt and yield its outputs as they come, each with what is new; the request is aborted if this ends early."""
    from hardpoint.sampling import RequestOutputKind

    request_id = f"stream-{next(_request_numbers)}"
    llm.engine.add_request(request_id, prompt, params.clone(output_kind=RequestOutputKind.DELTA))
    try:
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                if output.request_id == request_id:
                    yield output  # type: ignore[misc]  # no embedding has this id
    finally:
        llm.engine.abort_request(request_id)


def rate(tokens: float, seconds: float) -> float | None:
    """Return tokens per second; None where nothing was timed."""
    return tokens / seconds if seconds > 0 else None


def show_rate(tokens: float, seconds: float) -> str:
    """Return tokens per second as text."""
    value = rate(tokens, seconds)
    return "-" if value is None else f"{value:,.1f} tokens/s"


def backend_name(info: EngineInfo) -> str:
    """Return backend and device as one reads them, with the label that a simulation must carry."""
    return f"{info.backend} ({info.device}{', simulated' if info.simulated else ''})"


def show_formats(info: EngineInfo) -> str:
    """Return in which blocks weights are multiplied by, as the beginning of a list; empty where all are in the model's dtype."""
    from hardpoint.interfaces.blocks import BlockFormat

    counts = [f"{count} in {name}" for name, count in sorted(info.weight_formats.items()) if name in set(BlockFormat)]
    return f"matrices multiplied as blocks: {', '.join(counts)}; " if counts else ""


def describe(info: EngineInfo) -> dict[str, Any]:
    """Return what an engine is, for JSON."""
    return {
        "model": {"name": info.model, "architecture": info.architecture, "dtype": info.dtype},
        "backend": {"name": info.backend, "device": info.device, "simulated": info.simulated},
        "engine": {
            "path": info.path,
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": info.pipeline_parallel_size,
            "data_parallel_size": info.data_parallel_size,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "num_device_blocks": info.num_device_blocks,
            "weight_bytes": info.weight_bytes,
            "weight_formats": dict(info.weight_formats),
            "kv_bytes": info.kv_bytes,
        },
    }


def timings(info: EngineInfo, stats: EngineStats) -> dict[str, Any]:
    """Return load, prefill and decode times in seconds and rates in tokens per second, for JSON."""
    return {
        "load_seconds": info.load_seconds,
        "prefill_tokens": stats.prefill_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "prefill_tokens_per_second": rate(stats.prefill_tokens, stats.prefill_seconds),
        "decode_tokens": stats.decode_tokens,
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": rate(stats.decode_tokens, stats.decode_seconds),
    }


def prefix_cache(stats: EngineStats) -> dict[str, Any]:
    """Return prefix-cache statistics in tokens, for JSON."""
    return {
        "queried_tokens": stats.prefix_queries,
        "hit_tokens": stats.prefix_hits,
        "hit_rate": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None,
    }
