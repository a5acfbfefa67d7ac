"""End to end: the real demo model, on the discovered CPU backend, against transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from hardpoint import LLM, LLMEngine, SamplingParams
from hardpoint_conformance.tiny_model import Model, Shape, demo_file, read_demo, tiny_model
from tests.shallow_demo import write_shallow_demo

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


SHALLOW = Shape(hidden=576, intermediate=1536, layers=2, heads=9, kv_heads=3, head_dim=64, vocab=2048, max_len=1024)
"""Layers of the demo's shapes, so that they are computed by the same kernels in the same tiles, but few, and a small vocabulary."""


@contextmanager
def engine(model: str = "demo", **settings: Any) -> Iterator[LLM]:
    """Make an engine with float32 weights, of the demo model by default, and shut it down.

    Its steps are small, since one of the largest is run at a start.
    """
    sizes = {"max_model_len": 1024, "num_device_blocks": 256, "max_num_batched_tokens": 256}
    settings = {"dtype": "float32", "backend": "cpu"} | sizes | settings
    llm = LLM(model, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def drain(engine: LLMEngine) -> dict[str, list[Any]]:
    """Return all outputs of an engine's requests, by their ids, once they have ended."""
    outputs: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return PROMPTS


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Any]:
    return engine


@pytest.fixture(scope="session")
def shallow() -> Model:
    """A seeded model without tokenizer, for what does not depend on the weights; it starts and computes in milliseconds."""
    return tiny_model(SHALLOW)


@pytest.fixture(scope="session")
def make_shallow(shallow: Model) -> Callable[..., Any]:
    return partial(engine, shallow.path, skip_tokenizer_init=True)


@pytest.fixture(scope="session")
def shallow_demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model's first layers and tokens, for what needs its tokenizer and its quantised weights, and no sense."""
    return write_shallow_demo(tmp_path_factory.mktemp("shallow") / "shallow.gguf")


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine of the demo model, which every test leaves as it was."""
    with engine(sleep_disk_directory=str(tmp_path_factory.mktemp("backups"))) as made:
        yield made


@pytest.fixture(scope="session")
def shallow_llm(shallow_demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine of the demo model's first layers, for texts that need no sense; every test leaves it as it was."""
    with engine(shallow_demo, sleep_disk_directory=str(tmp_path_factory.mktemp("backups"))) as made:
        yield made


@pytest.fixture(scope="session")
def greedy() -> Callable[..., SamplingParams]:
    def params(max_tokens: int = 24, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)

    return params


class Oracle:
    """transformers' own model of a model's weights: logits of every position of a token sequence."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def of(cls, model: Model) -> Oracle:
        """Return the oracle in float32; nothing of the engine reads the configuration and the weights."""
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.initialization import no_init_weights

        with no_init_weights():
            made = LlamaForCausalLM(LlamaConfig(**model.shape.config))
        missing, unexpected = made.load_state_dict(dict(model.weights), strict=False)
        assert set(missing) <= {"lm_head.weight"}
        assert not unexpected
        made.tie_weights()
        return cls(made.to(torch.float32).eval())

    @torch.inference_mode()
    def logits(self, token_ids: list[int], since: int) -> torch.Tensor:
        """Return float32[len(token_ids) - since, vocab]: row i predicts token `since + i`."""
        output = self.model(torch.tensor([token_ids]), logits_to_keep=len(token_ids) - since + 1)
        return output.logits[0, :-1].float()


@pytest.fixture(scope="session")
def oracle_float32() -> Oracle:
    """The demo model's, whose file the gguf package reads."""
    file = demo_file()
    assert file is not None
    return Oracle.of(read_demo(file))


@pytest.fixture(scope="session")
def oracle_bfloat16(oracle_float32: Oracle) -> Oracle:
    """Plain bfloat16 inference.

    Its matrix products are float32's of the same numbers, rounded once, as hardware that has bfloat16 computes them; a CPU without it
    takes five times as long for its own.
    """
    model = deepcopy(oracle_float32.model).to(torch.bfloat16)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = partial(_linear, layer.weight.float())
    return Oracle(model)


def _linear(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(inputs.float(), weight).to(torch.bfloat16)
