"""Small functions and names that scripts import beside the engine."""

from __future__ import annotations

import gc
import itertools
import logging
import socket
import uuid
from enum import StrEnum
from typing import Any, NoReturn

from hardpoint.interfaces.errors import ConfigError
from hardpoint.models import load_tokenizer, open_model


class UsageContext(StrEnum):
    """Who made an engine; accepted, and not looked at."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter:
    """Counts up, one with each `next`."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> int:
        return next(self._numbers)


def random_uuid() -> str:
    """Return a name that nobody else has, of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a port of this machine that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def init_logger(name: str) -> logging.Logger:
    """Return a logger."""
    return logging.getLogger(name)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what no engine holds any more."""
    gc.collect()


def get_tokenizer(
    tokenizer_name: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    **_: Any,
) -> Any:
    """Return the tokenizer of a model, which is fetched as the engine fetches it; raises ModelError."""
    source = open_model(
        tokenizer_name,
        load_format="dummy",
        revision=revision,
        download_dir=download_dir,
        trust_remote_code=trust_remote_code,
    )
    return load_tokenizer(source, trust_remote_code)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        "sending weights to a server over NCCL is not supported",
        found=f"a call of vLLM's {name}",
        hint="Use vllm_mode='colocate', or update a server's weights through its control interface (docs/serving.md)",
    )


def get_ip() -> str:
    """Refuse; raises ConfigError."""
    _refuse("get_ip")


def trainer_init(*_: Any, **__: Any) -> Any:
    """Refuse; raises ConfigError."""
    _refuse("trainer_init")


def packed_nccl_broadcast_producer(*_: Any, **__: Any) -> Any:
    """Refuse; raises ConfigError."""
    _refuse("packed_nccl_broadcast_producer")
