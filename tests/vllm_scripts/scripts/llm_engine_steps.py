"""The engine driven step by step"""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

TEST_PROMPTS = [
    (
        "A robot may not injure a human being",
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, prompt_logprobs=1),
    ),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=6)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=6)),
]


def process_requests(engine: LLMEngine):
    waiting, request_id, finished = list(TEST_PROMPTS), 0, []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        finished += [output for output in outputs if output.finished]
    return finished


def main(args: argparse.Namespace):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    finished = {output.request_id: output for output in process_requests(engine)}
    assert sorted(finished) == ["0", "1", "2"]
    assert [len(output.outputs) for _, output in sorted(finished.items())] == [1, 1, 2]
    assert finished["0"].prompt_logprobs[0] is None


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    main(parser.parse_args(["--model", "tiny/llama", "--max-model-len", "256"]))
