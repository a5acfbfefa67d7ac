"""Words that must not appear"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
free = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={35: 100.0}))[0]
assert free.outputs[0].text == "D" * 10
params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={35: 100.0}, bad_words=["D"])
assert "D" not in llm.generate("Hi", params)[0].outputs[0].text
