"""Beam search"""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM("tiny/llama", max_model_len=64)
(output,) = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
print(output)
assert len(output.sequences) == 3
assert output.sequences[0].cum_logprob >= output.sequences[1].cum_logprob
