"""Sleep and wake"""

from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
llm = LLM("tiny/llama", enable_sleep_mode=True, max_model_len=256)
before = llm.generate("Hello", params)[0].outputs[0].token_ids
llm.sleep(level=1)
llm.wake_up()
assert llm.generate("Hello", params)[0].outputs[0].token_ids == before
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
llm.collective_rpc("reload_weights")
llm.wake_up(tags=["kv_cache"])
assert llm.generate("Hello", params)[0].outputs[0].token_ids == before
