"""End to end: the real demo model, on the discovered CPU backend, against transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_conformance.tiny_model import demo_file, read_demo

PROMPTS = [
    "The capital of France is",
    "Give three facts about the moon.",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "Explain why the sky is blue.",
    "1, 1, 2, 3, 5, 8,",
    "The quick brown fox",
    "Water boils at",
    "import numpy as np\n\ndef softmax(x):",
    "List the planets of the solar system:",
    "Translate to French: Good morning, my friend.",
    "Roses are red,",
    "In 1969, astronauts",
    "The derivative of x squared is",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "Q: What is the tallest mountain on Earth?\nA:",
    "The three primary colours are",
    "To make a good cup of tea, first",
]


@contextmanager
def engine(model: str = "demo", **settings: Any) -> Iterator[LLM]:
    """Make an engine with float32 weights, of the demo model by default, and shut it down."""
    settings = {"dtype": "float32", "backend": "cpu", "max_model_len": 1024, "num_device_blocks": 256} | settings
    llm = LLM(model, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return PROMPTS


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Any]:
    return engine


@pytest.fixture(scope="session")
def greedy() -> Callable[..., SamplingParams]:
    def params(max_tokens: int = 24, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)

    return params


class Oracle:
    """transformers' own model with the demo's weights: logits of every position of a token sequence."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def logits(self, token_ids: list[int], since: int) -> torch.Tensor:
        """Return float32[len(token_ids) - since, vocab]: row i predicts token `since + i`."""
        output = self.model(torch.tensor([token_ids]), logits_to_keep=len(token_ids) - since + 1)
        return output.logits[0, :-1].float()


@pytest.fixture(scope="session")
def oracle_float32() -> Oracle:
    """Its configuration and weights are read by the gguf package, as the conformance suite's are, and by nothing of the engine."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    file = demo_file()
    assert file is not None
    demo = read_demo(file)
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**demo.shape.config))
    missing, unexpected = model.load_state_dict(dict(demo.weights), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return Oracle(model.to(torch.float32).eval())


@pytest.fixture(scope="session")
def oracle_bfloat16(oracle_float32: Oracle) -> Oracle:
    return Oracle(deepcopy(oracle_float32.model).to(torch.bfloat16))
