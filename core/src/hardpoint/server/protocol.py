"""OpenAI's requests and answers as declared types, with the further sampling parameters that vLLM's users know.

A field that is not declared is refused by name. Those that OpenAI's clients send and that have no meaning here are declared as `Inert`.
"""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Inert: TypeAlias = Annotated[Any, Field(description="Accepted and without effect.")]
TokenIds: TypeAlias = list[int]


def _encodable(text: str) -> str:
    text.encode()  # a lone surrogate is a ValueError
    return text


Unicode: TypeAlias = Annotated[str, AfterValidator(_encodable)]
"""A text that answers repeat, or that an engine is sent: without lone surrogates, which JSON can spell and UTF-8 does not have."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Answer(BaseModel):
    pass


class StreamOptions(_Request):
    """What a stream carries beside its text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Inert = None


class JsonSchema(_Request):
    """A schema that the text is to fit. It is held to it whatever `strict` says; one without a schema is any JSON."""

    name: str | None = None
    description: Inert = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Request):
    """How the text is to be shaped."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Request):
    """What the text must match; see `hardpoint.sampling.StructuredOutputsParams`."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(_Request):
    """What `/v1/completions` and `/v1/chat/completions` share: how tokens are chosen. None is what the model's publisher recommends."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # Fields of vLLM's server
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # A field of conversations in OpenAI's interface, and of all requests in vLLM's
    response_format: ResponseFormat | None = None
    # Accepted, and without meaning here
    user: Inert = None
    metadata: Inert = None
    service_tier: Inert = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_retention: Inert = None


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds] | None = None
    prompt_embeds: str | list[str] | None = None
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: None = None
    add_special_tokens: bool = True


class CalledFunction(_Lenient):
    """A function that was called, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Called(_Lenient):
    """A call in a message of the model's that a client sends back."""

    function: CalledFunction


class ChatMessage(_Lenient):
    """One message of a conversation; what a model's template knows beside the declared fields is passed on to it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Called] | None = None


class Function(_Request):
    """A function that the model may call. Where a call must be, its arguments are held to the schema whatever `strict` says."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Request):
    """Something that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(_Request):
    """The name of a function."""

    name: str


class ChosenTool(_Request):
    """The function that the model has to call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None


class PooledRequest(_Request):
    """What requests have in common whose prompts' hidden states are pooled; see `hardpoint.sampling.PoolingParams`."""

    input: str | list[str] | TokenIds | list[TokenIds]
    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: Inert = None


class EmbeddingRequest(PooledRequest):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None


class ClassifyRequest(PooledRequest):
    """`POST /classify`."""


class PoolingRequest(PooledRequest):
    """`POST /pooling`: what the task says, by default what the model is for."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None


class TokenizeRequest(_Request):
    """`POST /tokenize`: of a text, or of a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Request):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class CachedTokens(_Answer):
    """How much of the prompt the prefix cache had."""

    cached_tokens: int = 0


class Usage(_Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class CompletionLogprobs(_Answer):
    """Log probabilities of a completion, one entry for each token.

    Attributes:
        text_offset: of each token's text in the whole, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None


class Completion(_Answer):
    """The answer of `/v1/completions`, or one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(_Answer):
    """One token that was possible at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was chosen at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log probabilities of a message, one entry for each token."""

    content: list[TokenLogprob]


class CallFunction(_Answer):
    """The function of a call, with its arguments as JSON, or what is new of them."""

    name: str | None = None
    arguments: str


class ToolCall(_Answer):
    """A call, or what is new of it: `index` is in the parts of a stream alone, `id`, `type` and name in the first part of each call."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallFunction


class AnswerMessage(_Answer):
    """The model's message, or what is new of it.

    Attributes:
        reasoning_content, reasoning: the same; clients know one or the other.
    """

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Answer):
    """One answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None


class ChatCompletion(_Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: TokenIds | None = None


class ChatDelta(_Answer):
    """What is new of one answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None


class ChatChunk(_Answer):
    """One event of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None


class Embedding(_Answer):
    """One embedding: numbers, or the base64 of their float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(_Answer):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Classification(_Answer):
    """The labels of a prompt: the one with the highest probability by its name, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(_Answer):
    """The answer of `/classify`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class PooledPrompt(_Answer):
    """What was made of a prompt, or a list of what was made of each of its tokens; float32 in base64 where that was asked for."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] | list[float] | str


class Pooled(_Answer):
    """The answer of `/pooling`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledPrompt]
    usage: Usage


class ModelCard(_Answer):
    """A model that is served.

    Attributes:
        root: its folder, file or hub id; of an adapter its folder.
        state: of its engine; see docs/serving.md.
        parent: of a LoRA adapter, the model that it is added to.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hardpoint"
    root: str
    max_model_len: int | None = None
    state: str
    parent: str | None = None


class ModelList(_Answer):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(_Answer):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None = None


class Detokenized(_Answer):
    """The answer of `/detokenize`."""

    prompt: str


def new_id(kind: str) -> str:
    """Return the id of an answer."""
    return f"{kind}-{token_hex(16)}"


def now() -> int:
    """Return the time as answers give it, in seconds."""
    return int(time.time())
