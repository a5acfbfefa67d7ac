"""Completions of a list of prompts"""

from vllm import LLM, SamplingParams

prompts = ["The capital of France is", "The colour of the sky is"]
sampling_params = SamplingParams(temperature=0, max_tokens=8)


def main():
    llm = LLM(model="demo", max_model_len=256, num_gpu_blocks_override=64)
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[0].outputs[0].finish_reason == "length"
    assert outputs[0].outputs[0].finished()


if __name__ == "__main__":
    main()
