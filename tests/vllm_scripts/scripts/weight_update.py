"""Weights that a trainer writes, in the engine's process"""

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
trainer = AutoModelForCausalLM.from_pretrained("tiny/llama", dtype=torch.float32)
llm = LLM("tiny/llama", max_model_len=64, enable_sleep_mode=True, dtype="float32")
before = llm.generate("Hello", params)[0].outputs[0].token_ids

with torch.no_grad():
    for parameter in trainer.parameters():
        parameter.mul_(0.5).add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
model = llm.llm_engine.model_executor.driver_worker.model_runner.model
model.load_weights(trainer.state_dict().items())
llm.wake_up(tags=["kv_cache"])
llm.reset_prefix_cache()
after = llm.generate("Hello", params)[0].outputs[0]
assert after.token_ids != before
ids = llm.get_tokenizer().encode("Hello")
expected = trainer.generate(torch.tensor([ids]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, len(ids) :]
assert list(after.token_ids) == expected.tolist()
