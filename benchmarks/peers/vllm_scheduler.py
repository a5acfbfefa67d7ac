"""vLLM's V1 scheduler as a peer of `benchmarks/scheduler.py`; runs in vLLM's own environment, without model or device.

A server on standard input and output: each line in is a JSON workload, each line out its result, so that the caller can
interleave rounds of both schedulers. Times are of schedule() plus update_from_output() (and, for an admission, of making
the request and adding it), in seconds of the thread's processor time.
"""

# What vLLM may import has to be settled before it is imported.

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


class WithoutMedia(PathFinder):
    """Image and audio packages count as not installed: they are not used here, and builds for another torch do not import."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in ("torchvision", "torchaudio", "torchcodec"):
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutMedia

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.config import SchedulerConfig as VllmSchedulerConfig
from vllm.model_executor.models import registry
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 200_000,
    "max_position_embeddings": 65_536,
}


class Peer:
    def __init__(self, folder: str, block_size: int, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        max_model_len = 65_536
        scheduler_config = VllmSchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = num_blocks
        config = VllmConfig(
            scheduler_config=scheduler_config,
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
            ),
            cache_config=cache_config,
        )
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(block_size, hash_function)
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request(
            request_id=str(self.count),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.count += 1
        self.scheduler.add_request(request)
        return request.request_id

    def step(self) -> int:
        planned = self.scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=[[7] for _ in ids]
        )
        self.scheduler.update_from_output(planned, output)
        return planned.total_num_scheduled_tokens

    def finish(self, ids: list[str]) -> None:
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self.scheduler.schedule()


def decode(folder: str, running: int, steps: int, block_size: int, num_blocks: int) -> float:
    peer = Peer(folder, block_size, num_blocks, 65_536, 1024)
    rng = random.Random(0)
    for _ in range(running):
        peer.add([rng.randrange(1000, 150_000) for _ in range(100)], 100_000)
    while peer.step() != running:
        pass
    for _ in range(3):
        peer.step()
    times = []
    for _ in range(steps):
        start = time.thread_time()
        peer.step()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def admission(folder: str, tokens: int, repeats: int, block_size: int, num_blocks: int) -> dict[str, list[float]]:
    peer = Peer(folder, block_size, num_blocks, 65_536, 1024)
    rng = random.Random(0)
    times: dict[str, list[float]] = {"cold": [], "hit": [], "freed_hit": []}

    def admit(prompt: list[int]) -> tuple[str, float]:
        start = time.thread_time()
        request = peer.add(prompt, 1000)
        peer.step()
        return request, time.thread_time() - start

    for _ in range(repeats):
        prompt = [rng.randrange(1000, 150_000) for _ in range(tokens)]
        first, seconds = admit(prompt)
        times["cold"].append(seconds)
        second, seconds = admit(prompt)
        times["hit"].append(seconds)
        peer.finish([first, second])
        third, seconds = admit(prompt)
        times["freed_hit"].append(seconds)
        peer.finish([third])
    return times


def main() -> None:
    torch.set_num_threads(1)
    # vLLM looks at a model's class in another process, where media packages would be seen again.
    registry._run_in_subprocess = lambda inspect: inspect()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        replies.write(json.dumps({"version": vllm.__version__, "python": sys.version.split()[0]}) + "\n")
        replies.flush()
        for line in sys.stdin:
            job: dict[str, Any] = json.loads(line)
            run = {"decode": decode, "admission": admission}[job.pop("kind")]
            replies.write(json.dumps(run(folder, **job)) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
