"""Asynchronous streaming of deltas"""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    return text


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny/llama", enforce_eager=True, max_model_len=256))
    try:
        alone = await stream_response(engine, "The future is", "request-0")
        together = await asyncio.gather(*(stream_response(engine, "The future is", f"request-{n}") for n in (1, 2, 3)))
        assert alone
        assert set(together) == {alone}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
