"""All models of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from hardpoint.interfaces.errors import ConfigError
from hardpoint.server.budget import DeviceBudget
from hardpoint.server.errors import ApiError
from hardpoint.server.served_model import AdaptedModel, ServedModel
from hardpoint.validation import did_you_mean


class Fleet:
    """The models that are served, by name; the first one is for requests that name none.

    Args:
        budget: of the device that they share; None where it holds all of them.
    """

    def __init__(self, models: Sequence[ServedModel], budget: DeviceBudget | None = None) -> None:
        self.budget = budget
        if budget is not None:
            budget.watch(models)
        self._models = {model.name: model for model in models}
        names = [*self._models, *(name for model in models for name in model.adapters)]
        if len(self._models) < len(models) or len(set(names)) < len(names):
            raise ConfigError(
                "two models or adapters are served under one name",
                found=", ".join(names),
                hint="Give each a name of its own: NAME=MODEL",
            )

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def asked(self, name: str | None) -> ServedModel:
        """Return what a user's request asks for: a model, or one with an adapter, by its name; raises ApiError (404)."""
        if name is not None and name not in self._models:
            for model in self:
                if name in model.adapters:
                    return AdaptedModel(name, model)
        return self.get(name)

    def check_new(self, name: str, model: ServedModel) -> None:
        """Raise ApiError (409) where another model, or an adapter of another one, has a name that an adapter of `model` is to have."""
        if name in self._models or any(name in one.adapters for one in self if one is not model):
            raise ApiError(409, f"'{name[:200]}' is served already", "name_taken", param="lora_name")

    def get(self, name: str | None) -> ServedModel:
        """Return a model by name; raises ApiError (404)."""
        if name is None:
            return next(iter(self))
        if name not in self._models:
            hint = did_you_mean(name, [*self._models, *(one for model in self for one in model.adapters)])
            raise ApiError(
                404, f"the model '{name[:200]}' is not served here. {hint}", "model_not_found", param="model"
            )
        return self._models[name]

    async def start(self) -> None:
        """Load all models, one after the other; where one fails, those before it are ended again."""
        try:
            for model in self:
                await model.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all models, each once its requests have ended or their time is over."""
        await asyncio.gather(*(model.close() for model in self))
