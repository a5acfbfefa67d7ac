"""Engine and trainer in turns: the example's own code, on few layers of the demo's shapes (`test_examples.py` runs it as a command)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint_conformance.tiny_model import Model

PROMPTS = [[5, 9, 22, 7], list(range(40))]
ROUNDS, TOKENS = 10, 12


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = spec_from_file_location("rlhf_loop", Path(__file__).parents[2] / "examples" / "rlhf_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rlhf_loop", module)  # its dataclass looks there
        spec.loader.exec_module(module)
        yield module


@dataclass
class Run:
    """Ten rounds.

    Attributes:
        rounds: what the example reports of each.
        fresh: tokens that an engine gives which is made of the trainer's weights then.
        resident: bytes of this process after each.
        weight_bytes: of the engine.
        before: tokens before the first.
    """

    rounds: list[Any]
    fresh: list[list[list[int]]]
    resident: list[int]
    weight_bytes: int
    before: list[list[int]]


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def run(example: ModuleType, make_engine: Callable[..., Any], shallow: Model, tmp_path_factory: Any) -> Run:
    def tokens_of(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("updated")
    with make_engine(shallow.path, skip_tokenizer_init=True, enable_sleep_mode=True) as llm:
        trainer = example.Trainer(shallow.path, 2e-3)
        run = Run([], [], [], llm.info.weight_bytes, tokens_of(llm))
        for one in example.rounds(llm, trainer, PROMPTS, ROUNDS, TOKENS):
            run.rounds.append(one)
            run.resident.append(_resident())
            if len(run.rounds) in (1, ROUNDS):
                trainer.model.save_pretrained(folder)
                with make_engine(str(folder), skip_tokenizer_init=True) as fresh:
                    run.fresh.append(tokens_of(fresh))
    return run


def test_each_update_changes_the_outputs(run: Run) -> None:
    outputs = [run.before, *(one.tokens for one in run.rounds)]
    assert all(before != after for before, after in pairwise(outputs))


def test_outputs_after_an_update_are_those_of_an_engine_made_of_the_new_weights(run: Run) -> None:
    assert run.fresh == [run.rounds[0].tokens, run.rounds[-1].tokens]


def test_ten_rounds_leave_memory_as_it_was(run: Run) -> None:
    for one in run.rounds:
        assert (one.slept, one.weights, one.kv_cache) == (
            run.rounds[0].slept,
            run.rounds[0].weights,
            run.rounds[0].kv_cache,
        )
        assert one.slept == one.weights + one.kv_cache
        assert one.slept > run.weight_bytes
    # The first rounds make the optimiser's moments and what libraries keep. After them, one copy of the weights lost in each round would
    # be seven copies; what the allocator keeps or gives back between rounds is less than one.
    later = run.resident[2:]
    assert later[-1] - later[0] < run.weight_bytes, run.resident
