"""Platforms such as TPU"""

from vllm.platforms import current_platform

assert current_platform.is_tpu()
