"""Asynchronous pooling"""

import asyncio

from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams


async def main():
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model="tiny/classifier", runner="pooling", max_model_len=64)
    )
    async for output in engine.encode("A text", PoolingParams(task="classify"), request_id="one"):
        assert output.finished
        assert abs(float(output.outputs.data.sum()) - 1) < 1e-4
    engine.shutdown()


asyncio.run(main())
