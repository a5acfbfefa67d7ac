"""Requests of a step-driven engine that are aborted"""

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils import random_uuid

engine = LLMEngine.from_engine_args(EngineArgs(model="tiny/llama", max_model_len=256))
kept, gone = random_uuid(), random_uuid()
for request_id in (kept, gone):
    engine.add_request(request_id, "Hello", SamplingParams(max_tokens=20, ignore_eos=True))
engine.step()
assert engine.get_num_unfinished_requests() == 2
engine.abort_request([gone])
last = {}
while engine.has_unfinished_requests():
    last |= {output.request_id: output for output in engine.step()}
assert set(last) == {kept}
assert len(last[kept].outputs[0].token_ids) == 20
