"""What TRL imports for its server mode, whether that is used or not, and what is refused when it is called."""

from __future__ import annotations

from typing import Any, NoReturn

from hardpoint.interfaces.errors import ConfigError


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
