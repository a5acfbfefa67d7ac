"""Complete a few prompts with the demo model: `python examples/offline.py`.

A script written for vLLM moves over by changing its import.
"""

from __future__ import annotations

from hardpoint import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "Water boils at", "The three primary colours are"]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    with LLM("demo") as llm:
        for output in llm.generate(prompts, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
