"""LangChain's language models over an engine in this process: `HardpointLLM` for texts, `ChatHardpoint` for conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, is_typeddict

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, BaseLLM, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from hardpoint import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams


class _OverEngine(BaseModel):
    """An engine and how it samples.

    Attributes:
        llm: the engine, which whoever made it shuts down; several models may share it, in any threads.
        sampling: parameters of `SamplingParams` by name, which those of a call (`bind`, `invoke`) come before; the publisher's otherwise.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: InstanceOf[LLM] = Field(exclude=True)
    sampling: dict[str, Any] = Field(default_factory=dict)

    def params(self, stop: Sequence[str] | None, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a call; raises InvalidSamplingParams."""
        changes = {**self.sampling, **given}
        if stop is not None:
            changes["stop"] = stop
        params = self.llm.get_default_sampling_params().clone(**changes)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            raise InvalidSamplingParams(
                "log probabilities do not reach LangChain",
                found=f"logprobs={params.logprobs}, prompt_logprobs={params.prompt_logprobs}",
                hint="Use LLM.generate or LLM.chat",
            )
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's token ids; LangChain counts tokens by it."""
        if self.custom_get_token_ids is not None:  # type: ignore[attr-defined]
            return super().get_token_ids(text)  # type: ignore[misc,no-any-return]
        return self.llm.engine.process.encode(text)

    def identity(self) -> dict[str, Any]:
        """Return what tells models apart, for LangChain's caches and traces."""
        return {"model_name": self.llm.info.model, **self.sampling}


# Of each class, since LangChain's base ignores others; its users give temperatures and their like to the model.
_NO_OTHER_FIELDS = ConfigDict(extra="forbid")


class HardpointLLM(_OverEngine, BaseLLM):  # type: ignore[misc]
    """Texts in, texts out; `batch` and `generate` give the engine all prompts at once.

    Example:
        >>> HardpointLLM(llm=LLM("demo"), sampling={"temperature": 0}).invoke("The capital of France is")
    """

    model_config = _NO_OTHER_FIELDS

    @property
    def _llm_type(self) -> str:
        return "hardpoint"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identity()

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        outputs = self.llm.generate(prompts, self.params(stop, kwargs), use_tqdm=False)
        usage = [_usage(output) for output in outputs]
        return LLMResult(
            generations=[
                [
                    Generation(text=one.text, generation_info={"finish_reason": one.finish_reason})
                    for one in output.outputs
                ]
                for output in outputs
            ],
            llm_output={
                "model_name": self.llm.info.model,
                "token_usage": {
                    "prompt_tokens": sum(one["input_tokens"] for one in usage),
                    "completion_tokens": sum(one["output_tokens"] for one in usage),
                    "total_tokens": sum(one["total_tokens"] for one in usage),
                },
            },
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for output in self.llm.stream(prompt, _of_one(self.params(stop, kwargs))):
            (new,) = output.outputs
            info = {"finish_reason": new.finish_reason} if output.finished else None
            chunk = GenerationChunk(text=new.text, generation_info=info)
            if run_manager is not None:
                run_manager.on_llm_new_token(new.text, chunk=chunk)
            yield chunk


class ChatHardpoint(_OverEngine, BaseChatModel):  # type: ignore[misc]
    """Conversations in, answers out, as the model's chat template writes them.

    Calls of tools are not read from answers: `bind_tools` is refused. `with_structured_output` holds answers to a schema while they are
    drawn, and needs no tools.
    """

    model_config = _NO_OTHER_FIELDS

    @property
    def _llm_type(self) -> str:
        return "hardpoint-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identity()

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        (output,) = self.llm.chat(convert_to_openai_messages(messages), self.params(stop, kwargs), use_tqdm=False)
        usage = _usage(output)
        return ChatResult(
            generations=[
                ChatGeneration(
                    message=AIMessage(
                        content=one.text,
                        usage_metadata=usage,
                        response_metadata={"finish_reason": one.finish_reason, "model_name": self.llm.info.model},
                    )
                )
                for one in output.outputs
            ]
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt = self.llm.engine.process_chat(convert_to_openai_messages(messages))
        num_tokens = 0
        for output in self.llm.stream(prompt, _of_one(self.params(stop, kwargs))):
            (new,) = output.outputs
            num_tokens += len(new.token_ids)
            last: dict[str, Any] = {}
            if output.finished:
                last = {
                    "usage_metadata": _counts(len(output.prompt_token_ids), num_tokens),
                    "response_metadata": {"finish_reason": new.finish_reason, "model_name": self.llm.info.model},
                    "chunk_position": "last",
                }
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=new.text, **last))
            if run_manager is not None:
                run_manager.on_llm_new_token(new.text, chunk=chunk)
            yield chunk

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> NoReturn:
        """Refuse: raises InvalidRequest."""
        raise InvalidRequest(
            "tool calls are not read from answers in this process",
            found=f"{len(tools)} tools",
            hint="Run `hardpoint serve MODEL`, which reads them, and use langchain_openai.ChatOpenAI",
        )

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a model whose answers match a JSON schema, given as itself, as a pydantic class or as LangChain converts it.

        An answer that `max_tokens` cut, 16 of them where nothing else is said, is an OutputParserException.

        Raises:
            InvalidRequest: the schema is something else, or `include_raw` or another option is given.
        """
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            json, parser = schema.model_json_schema(), _WholePydantic(pydantic_object=schema)
        elif is_typeddict(schema) or (isinstance(schema, dict) and schema.keys() & _OF_FUNCTIONS):
            json, parser = convert_to_json_schema(schema), _WholeJson()
        elif isinstance(schema, dict):
            json, parser = schema, _WholeJson()
        else:
            raise InvalidRequest(
                "a schema is a mapping, a TypedDict or a pydantic class",
                found=repr(schema),
                hint="Give its JSON schema",
            )
        options = [*(["include_raw"] if include_raw else []), *kwargs]
        if options:
            raise InvalidRequest(
                "with_structured_output takes a schema and no options", found=", ".join(options), hint="Leave them out"
            )
        return self.bind(structured_outputs=StructuredOutputsParams(json=json)) | parser


_OF_FUNCTIONS = {"name", "function", "toolSpec"}
"""Keys of descriptions of functions, in the forms that LangChain knows, which no JSON schema has."""


class _Whole:
    """A parser that takes no answer that was cut, which LangChain's would complete as if it were whole."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return what the answer holds; raises OutputParserException."""
        reason = getattr(result[0], "message", AIMessage("")).response_metadata.get("finish_reason")
        if reason not in (None, "stop"):
            raise OutputParserException(
                f"the answer is not whole: finish reason {reason!r}. Raise max_tokens", llm_output=result[0].text
            )
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class _WholeJson(_Whole, JsonOutputParser):  # type: ignore[misc]
    pass


class _WholePydantic(_Whole, PydanticOutputParser):  # type: ignore[misc]
    pass


def _of_one(params: SamplingParams) -> SamplingParams:
    if params.num_sequences != 1:
        raise InvalidSamplingParams("a stream has one completion", found=f"n={params.n}", hint="Use invoke or generate")
    return params


def _usage(output: RequestOutput) -> UsageMetadata:
    return _counts(len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs))


def _counts(prompt: int, new: int) -> UsageMetadata:
    return UsageMetadata(input_tokens=prompt, output_tokens=new, total_tokens=prompt + new)
