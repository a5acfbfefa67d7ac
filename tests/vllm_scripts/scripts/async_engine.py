"""AsyncLLMEngine made before an event loop runs, with an aborted request"""

import asyncio

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.utils import random_uuid

engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="tiny/llama", max_model_len=512, disable_log_stats=True))


async def main():
    await engine.check_health()
    final = None
    async for output in engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True), random_uuid()):
        final = output
    assert len(final.outputs[0].token_ids) == 8

    seen = 0
    async for output in engine.generate("Hello", SamplingParams(max_tokens=400, ignore_eos=True), "long"):
        seen = len(output.outputs[0].token_ids)
        if not output.finished:
            await engine.abort("long")
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < seen < 400


asyncio.run(main())
engine.shutdown()
