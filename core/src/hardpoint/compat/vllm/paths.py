"""Which module of vLLM has which of our names, and what is said of a module that has none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hardpoint.compat.vllm.requests import NotHere

HOME = "hardpoint.compat.vllm"

_PARAMS = ("BeamSearchParams", "SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "GuidedDecodingParams")
_OUTPUTS = (
    *(
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
    ),
    *("PoolingOutput", "PoolingRequestOutput", "RequestOutput", "ScoringOutput", "ScoringRequestOutput"),
)
_PROMPTS = ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt")
_ENGINE_ARGS = ("AsyncEngineArgs", "EngineArgs")
_ASYNC = ("AsyncLLM", "AsyncLLMEngine")
_NETWORK = ("get_ip", "get_open_port")
_TO_SERVER = ("packed_nccl_broadcast_producer", "trainer_init")

_OF_MODELS = "Models are those of `hardpoint.models`; others run with transformers' code"

_MODULES: Mapping[str, Sequence[str]] = {
    "beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
    "distributed": ("cleanup_dist_env_and_memory",),
    "distributed.parallel_state": ("cleanup_dist_env_and_memory",),
    "distributed.weight_transfer": (),
    "distributed.weight_transfer.nccl_common": _TO_SERVER,
    "distributed.weight_transfer.packed_tensor": _TO_SERVER,
    "engine": (),
    "engine.arg_utils": _ENGINE_ARGS,
    "engine.async_llm_engine": _ASYNC,
    "engine.llm_engine": ("LLMEngine",),
    "entrypoints": (),
    "entrypoints.llm": ("LLM",),
    "exceptions": ("VLLMValidationError",),
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "inputs.llm": _PROMPTS,
    "logger": ("init_logger",),
    "logprobs": ("FlatLogprobs", "Logprob"),
    "lora": (),
    "lora.request": ("LoRARequest",),
    "outputs": _OUTPUTS,
    "pooling_params": ("PoolingParams",),
    "sampling_params": _PARAMS,
    "tokenizers": ("get_tokenizer",),
    "transformers_utils": (),
    "transformers_utils.tokenizer": ("get_tokenizer",),
    "usage": (),
    "usage.usage_lib": ("UsageContext",),
    "utils": ("Counter", "FlexibleArgumentParser", "random_uuid", *_NETWORK),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "utils.counter": ("Counter",),
    "utils.network_utils": _NETWORK,
    "v1": (),
    "v1.engine": (),
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.exceptions": ("EngineDeadError", "EngineGenerateError"),
    "v1.engine.llm_engine": ("LLMEngine",),
    "v1.metrics": (),
    "v1.metrics.reader": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "v1.metrics.stats": ("RequestStateStats",),
    "version": ("__version__",),
}

_REFUSED: Mapping[str, str] = {
    "ModelRegistry": _OF_MODELS,
    "assets": "There are no sample pictures, sounds and films: open pictures with Pillow",
    "benchmarks": "`hardpoint bench` measures, offline and of a server",
    "compilation": "There is nothing to configure: leave it out",
    "config": "Give the engine's arguments themselves, and PoolingParams with a request",
    "distributed.kv_transfer": "Prefill and decode run in one engine",
    "entrypoints.openai": "`hardpoint serve MODEL` is the server",
    "envs": "Settings are arguments, or variables of the environment that begin with HARDPOINT_",
    "initialize_ray_cluster": "Ranks run on Ray with distributed_executor_backend='ray'",
    "model_executor": _OF_MODELS,
    "multimodal": "Pictures are given as multi_modal_data, or in messages",
    "platforms": "`hardpoint doctor` shows backends and devices; platforms such as TPU need a backend of their own",
    "plugins": "Plugins are backends here (docs/adding-a-device.md)",
    "v1.sample": "Pass functions with each request: SamplingParams(logits_processors=[...])",
}
"""What to do where a script needs a module, or a name of the package itself, that has nothing here."""


class ModuleRefused(ModuleNotFoundError):
    """A module of vLLM, or a name in one, for which there is nothing here."""


def missing(module: str, name: str) -> Any:
    """Return a module within a module of vLLM, as `import vllm` alone gives them there; raises NotHere, which is an AttributeError."""
    full = f"{module}.{name}".removeprefix("vllm.")
    if full in _MODULES and "vllm" in sys.modules:
        return importlib.import_module(f"vllm.{full}")
    raise NotHere(f"Hardpoint has nothing for 'vllm.{full}'", hint=_reason(full))


def _reason(name: str) -> str:
    told = (why for start, why in _REFUSED.items() if f"{name}.".startswith(f"{start}."))
    return next(told, "docs/moving-from-vllm.md lists what there is")


class _Module(ModuleType):
    """A module of vLLM, whose names are looked up where we have them."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(name)
        self.__all__ = list(names)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            return missing(self.__name__, name)
        home = f"{HOME}.metrics" if self.__name__.endswith(".metrics.reader") else HOME
        return getattr(importlib.import_module(home), name)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, _MODULES[spec.name.removeprefix("vllm.")])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are asked for."""


class Finder(MetaPathFinder):
    """Finds the modules of vLLM that have our names, and refuses the others with a reason."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a module's spec, None for modules of others; raises ModuleRefused."""
        if not fullname.startswith("vllm."):
            return None
        name = fullname.removeprefix("vllm.")
        if name in _MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        raise ModuleRefused(f"Hardpoint has nothing for {fullname!r}. {_reason(name)}", name=fullname)


def install(module: ModuleType) -> None:
    """Let `import vllm` mean a module, and what is below it be found here."""
    sys.modules["vllm"] = module
    if not any(isinstance(one, Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, Finder())
