"""Reinforcement learning in one process, in which engine and trainer take turns at the memory: `python examples/rlhf_loop.py --rounds 10`.

Each round the engine draws completions and sleeps at level 2; plain torch takes one step of a policy gradient on them; the engine takes
memory for its weights, is given the new ones in place, takes memory for its KV cache, and generates again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.models import open_model

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,"]
MIB = 1 << 20


class Trainer:
    """REINFORCE on transformers' model of the weights that the engine serves, in float32.

    The reward of a completion is a toy: how much of it is not repetition. It counts by how far it is above the mean of the same prompt's
    completions, in standard deviations (Shao et al., DeepSeekMath, 2024).
    """

    def __init__(self, model: str, learning_rate: float) -> None:
        source = open_model(model)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.values), dtype=torch.float32)
        stored = source.checkpoint
        # A tied head is not stored; `strict` would miss it.
        self.model.load_state_dict({name: stored.read(name).float() for name in stored.shapes()}, strict=False)
        self.model.tie_weights()
        source.close_weights()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def step(self, outputs: Sequence[RequestOutput]) -> float:
        """Take one step on the completions of some prompts; returns their mean reward."""
        total = 0.0
        for output in outputs:
            completions = [list(one.token_ids) for one in output.outputs]
            rewards = torch.tensor([len(set(tokens)) / len(tokens) for tokens in completions])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            (-(advantages * self._log_probabilities(list(output.prompt_token_ids), completions)).mean()).backward()
            total += rewards.mean().item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / len(outputs)

    def _log_probabilities(self, prompt: list[int], completions: list[list[int]]) -> Tensor:
        """Return float32[completions]: of each, the mean over its tokens."""
        length = max(map(len, completions))
        # What is beyond the end of a completion is seen by no token before it, and counts nothing.
        padded = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in completions])
        counts = torch.tensor([[float(place < len(tokens)) for place in range(length)] for tokens in completions])
        inputs = torch.cat([torch.tensor([prompt] * len(completions)), padded], dim=1)
        logits = self.model(input_ids=inputs, logits_to_keep=length + 1).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, padded[..., None])[..., 0]
        return (chosen * counts).sum(-1) / counts.sum(-1)


@dataclass(frozen=True)
class Round:
    """What one round did; sizes in bytes of the device.

    Attributes:
        reward: mean over the completions that were learned from.
        tokens: of each prompt's most probable completion after the update.
        texts: the same, where the engine has a tokenizer.
        slept: given back by the sleep.
        weights, kv_cache: taken again for them, the first with the engine's own working memory.
    """

    reward: float
    tokens: list[list[int]]
    texts: list[str]
    slept: int
    weights: int
    kv_cache: int


def rounds(llm: LLM, trainer: Trainer, prompts: Sequence[str | list[int]], count: int, tokens: int) -> Iterator[Round]:
    """Alternate between generating and learning, `count` times."""
    drawn = SamplingParams(n=4, temperature=1.0, max_tokens=tokens, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    for _ in range(count):
        outputs = llm.generate(prompts, drawn, use_tqdm=False)
        slept = llm.sleep(level=2)
        reward = trainer.step(outputs)
        weights = llm.wake_up(tags=["weights"])
        llm.update_weights(trainer.model.named_parameters())
        kv_cache = llm.wake_up(tags=["kv_cache"])
        best = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
        yield Round(
            reward,
            [list(one.token_ids) for one in best],
            [one.text for one in best],
            *(0 if report.memory is None else report.memory.unmapped for report in (slept, weights, kv_cache)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="'demo', a folder with a model, or a GGUF file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="of each completion")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    given = parser.parse_args()
    settings = {"dtype": "float32", "max_model_len": 256, "num_device_blocks": 64, "enable_sleep_mode": True}
    with LLM(given.model, **settings) as llm:
        trainer = Trainer(given.model, given.learning_rate)
        for number, one in enumerate(rounds(llm, trainer, PROMPTS, given.rounds, given.tokens), start=1):
            print(f"Round {number}: mean reward {one.reward:.3f}")
            print(
                f"  memory: sleep gave back {one.slept / MIB:.1f} MiB; weights took {one.weights / MIB:.1f} MiB, "
                f"the KV cache {one.kv_cache / MIB:.1f} MiB"
            )
            for prompt, text in zip(PROMPTS, one.texts, strict=True):
                print(f"  {prompt!r} -> {text!r}")


if __name__ == "__main__":
    main()
