"""LlamaIndex's language model over an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, TextBlock
from llama_index.core.bridge.pydantic import ConfigDict, Field
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import InstanceOf

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.engine.inputs import Prompt
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams

T = TypeVar("T")


class HardpointLLM(CustomLLM):  # type: ignore[misc]
    """Completions, and answers as the model's chat template writes conversations.

    Calls from several threads, and those of `acomplete` and its like, are served side by side. Arguments of a call are parameters of
    `SamplingParams`, and one completion is asked for.

    Attributes:
        llm: the engine, which whoever made it shuts down; several models may share it.
        sampling: parameters of `SamplingParams` by name, which those of a call come before; the publisher's otherwise.

    Example:
        >>> HardpointLLM(llm=LLM("demo"), sampling={"temperature": 0}).complete("The capital of France is").text
    """

    # Other fields are refused, since LlamaIndex's users give temperatures and their like to the model.
    model_config = ConfigDict(extra="forbid")

    llm: InstanceOf[LLM] = Field(exclude=True)
    sampling: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        return "hardpoint"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know of a model: its name, its context and how long answers are, in tokens."""
        most = self._params({}).max_tokens
        return LLMMetadata(
            context_window=self.llm.info.max_model_len,
            # -1 has LlamaIndex leave its own number of tokens free for the answer.
            num_output=-1 if most is None else most,
            is_chat_model=True,
            model_name=self.llm.info.model,
        )

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return what follows a text; `formatted` says that `completion_to_prompt` was used already."""
        (output,) = self.llm.generate(self._prompt(prompt, formatted), self._params(kwargs), use_tqdm=False)
        return CompletionResponse(text=output.outputs[0].text, additional_kwargs=_counts(output))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Iterator[CompletionResponse]:
        """Yield what follows a text as it grows."""
        for text, delta in self._grown(self._prompt(prompt, formatted), kwargs):
            yield CompletionResponse(text=text, delta=delta)

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation."""
        (output,) = self.llm.generate(self._conversation(messages), self._params(kwargs), use_tqdm=False)
        return ChatResponse(message=_answer(output.outputs[0].text), additional_kwargs=_counts(output))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Iterator[ChatResponse]:
        """Yield the answer to a conversation as it grows."""
        for text, delta in self._grown(self._conversation(messages), kwargs):
            yield ChatResponse(message=_answer(text), delta=delta)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """See `complete`."""
        return await asyncio.to_thread(self.complete, prompt, formatted, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncIterator[CompletionResponse]:
        """See `stream_complete`."""
        return _in_threads(self.stream_complete(prompt, formatted, **kwargs))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """See `chat`."""
        return await asyncio.to_thread(self.chat, messages, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncIterator[ChatResponse]:
        """See `stream_chat`."""
        return _in_threads(self.stream_chat(messages, **kwargs))

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        params = self.llm.get_default_sampling_params().clone(**{**self.sampling, **given})
        if params.num_sequences != 1:
            raise InvalidSamplingParams(
                "LlamaIndex takes one completion", found=f"n={params.n}", hint="Call it several times"
            )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            raise InvalidSamplingParams(
                "log probabilities do not reach LlamaIndex",
                found=f"logprobs={params.logprobs}, prompt_logprobs={params.prompt_logprobs}",
                hint="Use LLM.generate or LLM.chat",
            )
        return params

    def __getstate__(self) -> NoReturn:
        """Refuse: raises InvalidRequest. LlamaIndex's own takes what cannot be pickled, the engine, away from this model."""
        raise InvalidRequest(
            "an engine cannot be pickled", hint="Make it, and the model, in the process that uses them"
        )

    def _conversation(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Return messages as `messages_to_prompt` writes them where it was given, else as the model's chat template does."""
        if self.messages_to_prompt is not generic_messages_to_prompt:
            return str(self.messages_to_prompt(messages))
        return self.llm.engine.process_chat(_plain(messages))

    def _prompt(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted else self.completion_to_prompt(prompt)

    def _grown(self, prompt: Prompt, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
        text = ""
        for output in self.llm.stream(prompt, self._params(given)):
            delta = output.outputs[0].text
            text += delta
            yield text, delta


def _plain(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Return messages as `LLM.chat` takes them; raises InvalidRequest where one has something other than text."""
    others = sorted(
        {type(block).__name__ for one in messages for block in one.blocks if not isinstance(block, TextBlock)}
    )
    if others:
        raise InvalidRequest("messages are texts here", found=", ".join(others), hint="Leave the others out")
    return [{"role": one.role.value, "content": "".join(block.text for block in one.blocks)} for one in messages]


def _answer(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def _counts(output: RequestOutput) -> dict[str, Any]:
    """Return numbers of tokens under the names of OpenAI, which LlamaIndex's token counter reads."""
    prompt, new = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    reason = output.outputs[0].finish_reason
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "finish_reason": reason,
    }


async def _in_threads(items: Iterator[T]) -> AsyncIterator[T]:
    """Yield items, each made in a thread, so that the event loop goes on meanwhile."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item
