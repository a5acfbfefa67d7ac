"""A step of TRL's GRPOTrainer whose completions this engine draws, under vLLM's name, in the trainer's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.compat.vllm import stand_in

WORDS = 60
PROMPTS = [[5, 9, 22, 7], [30, 3, 3], list(range(4, 40))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of tiny shape with a tokenizer of words, in a folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{n}": n + 4 for n in range(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        **shape,
        **ids,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def greedy(llm: Any) -> list[list[int]]:
    from hardpoint import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("sleeps", [True, False], ids=["sleeping while it trains", "awake"])
def test_a_step_changes_the_weights_and_the_engine_generates_with_them(
    sleeps: bool, model: Path, tmp_path: Path
) -> None:
    stand_in()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from hardpoint import LLM

    seen: list[list[Any]] = []

    def reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        seen.append([list(ids) for ids in completion_ids])
        return [len(set(ids)) / len(ids) for ids in completion_ids]

    settings = GRPOConfig(
        output_dir=str(tmp_path / "output"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=sleeps,
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.01,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    prompts = Dataset.from_list([{"prompt": f"w{n} w{n + 1} w{n + 2}"} for n in range(8)])
    trainer = GRPOTrainer(model=str(model), reward_funcs=reward, args=settings, train_dataset=prompts)
    llm = trainer.vllm_generation.llm
    try:
        assert isinstance(llm, LLM)
        assert llm.is_sleeping() == sleeps
        before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
        trainer.train()
        assert len(seen) == 2
        # Both steps learned from what the weights before them have drawn: trainer and engine agree on how probable it was.
        logged = [one for one in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in one]
        assert all(one["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4) for one in logged)
        assert len(logged) == 2
        changed = [name for name, tensor in trainer.model.named_parameters() if not torch.equal(tensor, before[name])]
        assert set(changed) == set(before)

        trainer.vllm_generation.sync_weights()
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        after = greedy(llm)
        trainer.save_model(str(tmp_path / "trained"))
        with LLM(str(tmp_path / "trained"), max_model_len=64, num_device_blocks=16, dtype="float32") as fresh:
            assert after == greedy(fresh)
        with LLM(str(model), max_model_len=64, num_device_blocks=16, dtype="float32") as old:
            assert after != greedy(old)
    finally:
        llm.shutdown()
