"""Engine arguments from a YAML file, and parts of JSON arguments"""

from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

Path("engine.yaml").write_text("model: tiny/llama\nmax-model-len: 96\nenforce-eager: true\n")
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(
    [
        "--config",
        "engine.yaml",
        "--max-num-seqs",
        "4",
        "--compilation-config.mode",
        "3",
        "--compilation-config.pass.fuse",
        "true",
    ]
)
engine_args = AsyncEngineArgs.from_cli_args(args)
assert (engine_args.model, engine_args.max_model_len, engine_args.max_num_seqs) == ("tiny/llama", 96, 4)
assert engine_args.enforce_eager is True
assert engine_args.compilation_config == {"mode": 3, "pass": {"fuse": True}}
assert engine_args.tensor_parallel_size == 1
