"""Engine arguments from a command line"""

import dataclasses

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils import FlexibleArgumentParser


def parse_args(args):
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny/llama")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--top_p", type=float)
    return vars(parser.parse_args(args))


def main():
    args = parse_args(["--max_model_len", "128", "--max-tokens=7", "--top-p", "0.9", "--no-enable-prefix-caching"])
    max_tokens, top_p = args.pop("max_tokens"), args.pop("top_p")
    assert (max_tokens, top_p) == (7, 0.9)
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.top_p = max_tokens, top_p
    assert len(llm.generate("Hello", params)[0].outputs[0].token_ids) <= 7
    assert llm.llm_engine.model_config.max_model_len == 128

    engine_args = EngineArgs(model="tiny/llama", max_model_len=64)
    other = LLM(**dataclasses.asdict(engine_args))
    assert other.llm_engine.model_config.max_model_len == 64
    assert len(LLM.from_engine_args(engine_args).generate("a", SamplingParams(max_tokens=2))) == 1


if __name__ == "__main__":
    main()
