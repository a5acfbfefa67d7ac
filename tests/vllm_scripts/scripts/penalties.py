"""Penalties of repetition"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
plain = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
punished = llm.generate(
    "Hi",
    SamplingParams(
        temperature=0,
        max_tokens=30,
        ignore_eos=True,
        repetition_penalty=5.0,
        frequency_penalty=2.0,
        presence_penalty=1.0,
    ),
)[0].outputs[0]
assert len(set(punished.token_ids)) > len(set(plain.token_ids))
