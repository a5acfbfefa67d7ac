"""Adapters that PEFT made, trained for a step and saved: served here, they give what the weights give that PEFT merges them into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hardpoint import LLM, LoRARequest, RequestOutput, SamplingParams
from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import InvalidAdapter
from hardpoint_conformance.reference import judge
from hardpoint_conformance.tiny_model import Model, Shape, tiny_model

BASE = tiny_model(Shape(seed=3))
PROMPTS = [[3, 7, 9, 11, 50, 4], [200, 3, 3], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
MAX_RANK = 256

KINDS: dict[str, dict[str, Any]] = {
    # PEFT's default for Llamas: queries and values.
    "default": {"lora_alpha": 16},
    "all-linear": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    "patterns": {
        "target_modules": r".*\.(k_proj|up_proj|gate_proj)",
        "rank_pattern": {"up_proj": 12, r"layers\.1\.self_attn\.k_proj": 3},
        "alpha_pattern": {"up_proj": 48},
    },
    "one-layer": {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "greatest-rank": {"r": MAX_RANK, "lora_alpha": 32, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]},
}


def trained(**config: Any) -> PeftModel:
    """Return the base model with an adapter that one step of training has changed, so that it is no longer nothing."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(BASE.path, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **config))
    tokens = torch.randint(3, BASE.shape.vocab, (4, 24))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model


def saved(folder: Path, **config: Any) -> LoRARequest:
    """Train an adapter, save it with PEFT, and return the request for it."""
    trained(**config).save_pretrained(str(folder))
    return LoRARequest(folder.name, 1, str(folder))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "num_device_blocks": 64, "threads": 1}
    adapters = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": len(KINDS), "max_lora_rank": MAX_RANK}
    with LLM(BASE.path, skip_tokenizer_init=True, **settings, **adapters) as made:
        yield made


@pytest.fixture
def answers(llm: LLM) -> Callable[[LoRARequest | None], list[RequestOutput]]:
    def generate(adapter: LoRARequest | None) -> list[RequestOutput]:
        return llm.generate([{"prompt_token_ids": one} for one in PROMPTS], GREEDY, lora_request=adapter)

    return generate


def largest_ratio(model: Model, outputs: Sequence[RequestOutput]) -> float:
    """Return the largest margin of a model's own tokens over those that were generated, by what rounding explains."""
    ratios = []
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        judgement = judge(model, prompt + tokens, len(prompt), DType.FLOAT32)
        ratios.append(float(judgement.ratios.max()))
        for at, entry in enumerate(output.outputs[0].logprobs or ()):
            error = entry[tokens[at]].logprob - float(judgement.exact[at].log_softmax(-1)[tokens[at]])
            ratios.append(abs(error) / judgement.logprob_error)
    return max(ratios)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_gives_what_the_merged_weights_give(
    kind: str, tmp_path: Path, answers: Callable[[LoRARequest | None], list[RequestOutput]]
) -> None:
    found = answers(saved(tmp_path / kind, **KINDS[kind]))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE.path), str(tmp_path / kind))
    merged = replace(BASE, weights=loaded.merge_and_unload().state_dict())
    assert largest_ratio(merged, found) <= 1
    assert largest_ratio(BASE, found) > 10, "the adapter changes nothing that could be seen"
    assert largest_ratio(BASE, answers(None)) <= 1


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"trainable_token_indices": [3, 4]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": 320}, f"(?s)a rank of 320.*{MAX_RANK}.*max_lora_rank=320"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_name_and_others_are_served(
    config: dict[str, Any],
    match: str,
    tmp_path: Path,
    llm: LLM,
    answers: Callable[[LoRARequest | None], list[RequestOutput]],
) -> None:
    adapter = saved(tmp_path / "bad", **config)
    with pytest.raises(InvalidAdapter, match=match):
        llm.load_adapter(adapter)
    with pytest.raises(InvalidAdapter, match=match):
        answers(adapter)
    assert largest_ratio(BASE, answers(None)) <= 1


def test_another_method_than_lora_is_refused(tmp_path: Path, llm: LLM) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE.path), IA3Config(task_type="CAUSAL_LM"))
    model.save_pretrained(str(tmp_path))
    with pytest.raises(InvalidAdapter, match="peft_type 'IA3'"):
        llm.load_adapter(LoRARequest("ia3", 1, str(tmp_path)))
