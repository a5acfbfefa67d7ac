"""The ready-made worker: everything of a rank that is torch and not device.

`StandardWorker` is the worker of every backend, over the backend's `Platform`: `TorchPlatform` where torch has a module for the device.
`TorchGraphRunner` captures and replays steps by that module, and `ranks` joins ranks. What belongs here drives one device through the
contract's parts (platform, allocator, attention, kernels) and holds the model, the KV cache and the sampler. Scheduling, requests and
text belong to the engine.

`StandardWorker` answers the contract's calls by its parts: `loading` makes a `LoadedModel`, `Weights` writes it and keeps account,
`KVMemory` holds the blocks, `ModelRunner` launches steps (by `StepGraphs` where they are captured), samples and pools,
`profile` measures the largest step, `SleepCycle` prepares sleeps and wakes.
"""

from hardpoint.worker.kv_memory import copy_blocks
from hardpoint.worker.torch_device import TorchGraphRunner, TorchPlatform
from hardpoint.worker.worker import StandardWorker

__all__ = ["StandardWorker", "TorchGraphRunner", "TorchPlatform", "copy_blocks"]
