"""All models of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from hardpoint.interfaces.errors import ConfigError
from hardpoint.server.budget import DeviceBudget
from hardpoint.server.errors import ApiError
from hardpoint.server.served_model import ServedModel
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
        if len(self._models) < len(models):
            raise ConfigError(
                "two models are served under one name",
                found=", ".join(model.name for model in models),
                hint="Give each a name of its own: NAME=MODEL",
            )

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """Return a model by name; raises ApiError (404)."""
        if name is None:
            return next(iter(self))
        if name not in self._models:
            hint = did_you_mean(name, list(self._models))
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
