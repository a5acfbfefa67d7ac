"""Routes from texts to tokens and back."""

from __future__ import annotations

from fastapi import APIRouter

from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.protocol import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens
from hardpoint.server.served_model import ServedModel
from hardpoint.server.tools import in_template


def router(fleet: Fleet) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        model = fleet.asked(body.model)
        prompt = await _tokenized(model, body)
        strings = [model.llm.decode([one]) for one in prompt.token_ids] if body.return_token_strs else None
        longest = model.llm.info.max_model_len
        return Tokens(count=len(prompt.token_ids), max_model_len=longest, tokens=prompt.token_ids, token_strs=strings)

    @routes.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        return Detokenized(prompt=fleet.asked(body.model).llm.decode(body.tokens))

    return routes


async def _tokenized(model: ServedModel, body: TokenizeRequest) -> TokenizedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages is needed", "invalid_value", param="prompt")
    if body.prompt is not None:
        return await model.tokenize(body.prompt, add_special_tokens=body.add_special_tokens, reserve=0)
    messages, _ = in_template(body.messages or (), model.chat_template)
    return await model.apply_template(messages, add_generation_prompt=body.add_generation_prompt)
