"""Generation paused and resumed"""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


async def generate(engine, request_id, started=None):
    final = None
    async for output in engine.generate("Once", PARAMS, request_id):
        final = output
        if started is not None:
            started.set()
    return list(final.outputs[0].token_ids)


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny/llama", max_model_len=256))
    whole = await generate(engine, "whole")
    started = asyncio.Event()
    running = asyncio.create_task(generate(engine, "paused", started))
    await started.wait()
    await engine.pause_generation(mode="keep", clear_cache=False)
    assert await engine.is_paused()
    await engine.resume_generation()
    assert await running == whole
    engine.shutdown()


asyncio.run(main())
