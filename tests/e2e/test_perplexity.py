"""How well a text is predicted with weights multiplied as they are stored, beside the same weights expanded to float32.

The table over 20,480 tokens is that of `benchmarks/quantized.py --parts perplexity`; this is its beginning.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

from hardpoint import LLM, SamplingParams

CHUNK, CHUNKS = 256, 3


def perplexity(quantization: str) -> float:
    """Return the perplexity of Python's help texts by the demo model, over the second halves of their first chunks."""
    llm = LLM(
        "demo",
        quantization=quantization,
        dtype="float32",
        max_model_len=CHUNK + 1,
        num_device_blocks=128,
        enable_prefix_caching=False,
    )
    try:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None, "the demo model has a tokenizer"
        ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)[:8]))
        chunks = [ids[CHUNK * i : CHUNK * (i + 1)] for i in range(CHUNKS)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    finally:
        llm.shutdown()
    found = [
        output.prompt_logprobs[at][chunk[at]].logprob
        for chunk, output in zip(chunks, outputs, strict=True)
        for at in range(CHUNK // 2, CHUNK)
    ]
    assert len(found) == CHUNKS * CHUNK // 2
    return math.exp(-sum(found) / len(found))


def test_activations_of_eight_bits_cost_little_perplexity() -> None:
    exact, stored = perplexity("none"), perplexity("gguf")
    assert 2 < exact < 60
    assert abs(stored / exact - 1) < 0.005
    assert stored != exact
