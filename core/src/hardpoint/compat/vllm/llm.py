"""`LLM` with vLLM's arguments, and the way by which trainers reach its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hardpoint
from hardpoint.interfaces.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

_IMPLEMENTATIONS = ("auto", "vllm")
_CALLS = ("reload_weights", "reset_prefix_cache", "declare_weights_valid")


class LLM(hardpoint.LLM):
    """This engine under vLLM's arguments.

    None means the default, as it does there. Beside the settings of `EngineConfig`:

    - `distributed_executor_backend="external_launcher"`: the process that a launcher started is the engine's only rank.
    - `model_impl`: "auto" or "vllm", which both mean this engine's own choice.

    Raises:
        ConfigError: another argument, or another value of these.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        _choose("model_impl", given.pop("model_impl", "auto"), _IMPLEMENTATIONS)
        if given.get("distributed_executor_backend") == "external_launcher":
            if given.get("tensor_parallel_size", 1) != 1 or given.get("pipeline_parallel_size", 1) != 1:
                raise ConfigError(
                    "processes that a launcher started cannot be ranks of one engine",
                    found="distributed_executor_backend='external_launcher' with several ranks",
                    hint="Give each process an engine of one rank (vllm_tensor_parallel_size=1)",
                )
            given["distributed_executor_backend"] = "uni"
        super().__init__(model, **given)

    @property
    def llm_engine(self) -> SimpleNamespace:
        """What trainers reach through vLLM's engine: `model_config.max_model_len`, and the model's `load_weights`."""
        model = SimpleNamespace(load_weights=self._load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        return SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=self.info.max_model_len),
            model_executor=SimpleNamespace(driver_worker=worker),
        )

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of `reload_weights`, `reset_prefix_cache` and `declare_weights_valid`; returns its result, of the one rank.

        Raises InvalidRequest for another method, and for a timeout, which these do not have.
        """
        if method not in _CALLS:
            raise InvalidRequest(
                f"collective_rpc cannot call {method!r}", hint=f"It can call one of: {', '.join(_CALLS)}"
            )
        if timeout is not None:
            raise InvalidRequest("calls of collective_rpc have no time limit", found=f"timeout={timeout!r}")
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights and return their names; errors as for `update_weights`."""
        names: set[str] = set()

        def named() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        self.update_weights(named())
        return names


def _choose(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not supported", hint=f"Use one of: {', '.join(known)}")
    return str(value)
