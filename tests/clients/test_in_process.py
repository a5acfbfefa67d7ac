"""LangChain's and LlamaIndex's models over one engine in this process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.indices.prompt_helper import PromptHelper
from pydantic import BaseModel, ValidationError

from hardpoint import LLM, SamplingParams
from hardpoint.compat.langchain import ChatHardpoint, HardpointLLM
from hardpoint.compat.llama_index import HardpointLLM as LlamaIndexLLM
from hardpoint.compat.vllm import LLM as VLLM
from hardpoint.compat.vllm import SamplingParams as VLLMSamplingParams
from hardpoint.compat.vllm import stand_in
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams

QUESTION, PROMPTS = (
    "What is the capital of France?",
    ["The capital of France is", "Two plus two is", "Once upon a time"],
)
GREEDY = {"temperature": 0, "max_tokens": 8}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", backend="cpu", max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """What follows the prompts, as it comes without any wrapper."""
    return [output.outputs[0].text for output in llm.generate(PROMPTS, SamplingParams(**GREEDY))]


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    """The answer to the question, likewise."""
    (output,) = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(**GREEDY))
    return output.outputs[0].text


class Capital(BaseModel):
    city: Literal["Rome", "Paris"]


class Town(TypedDict):
    city: Literal["Rome", "Paris"]


FUNCTION = {"name": "Capital", "parameters": Capital.model_json_schema()}


class TestLangChain:
    def test_texts(self, llm: LLM, texts: list[str]) -> None:
        model = HardpointLLM(llm=llm, sampling=GREEDY)
        assert model.invoke(PROMPTS[0]) == texts[0]
        assert "".join(model.stream(PROMPTS[0])) == texts[0]
        assert model.batch(PROMPTS) == texts
        assert asyncio.run(model.abatch(PROMPTS)) == texts
        result = model.generate(PROMPTS[:2])
        assert [one[0].generation_info for one in result.generations] == [{"finish_reason": "length"}] * 2
        assert result.llm_output is not None
        assert result.llm_output["token_usage"]["completion_tokens"] == 16
        assert model.invoke(PROMPTS[0], max_tokens=2) == model.bind(max_tokens=2).invoke(PROMPTS[0]) != texts[0]
        assert model.invoke(PROMPTS[0], stop=["."]) == texts[0].split(".")[0]
        assert model.invoke(PROMPTS[0], stop="Paris") == texts[0].split("Paris")[0]
        assert model.get_num_tokens(PROMPTS[0]) == 5
        assert model.get_token_ids(PROMPTS[0]) == llm.engine.process.encode(PROMPTS[0])

    def test_conversations(self, llm: LLM, answer: str) -> None:
        model = ChatHardpoint(llm=llm, sampling=GREEDY)
        found = model.invoke(QUESTION)
        assert found.content == answer
        assert found.usage_metadata is not None
        assert found.usage_metadata["output_tokens"] == 8
        parts = list(model.stream([HumanMessage(QUESTION)]))
        whole: Any = sum(parts[1:], parts[0])
        assert isinstance(whole, AIMessageChunk)
        assert (whole.content, whole.usage_metadata) == (found.content, found.usage_metadata)
        assert len(parts) > 4
        chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | model
        assert [one.content for one in chain.batch([{"question": QUESTION}] * 3)] == [answer] * 3

        async def streamed() -> str:
            return "".join([str(part.content) async for part in model.astream(QUESTION)])

        assert asyncio.run(streamed()) == answer

    @pytest.mark.parametrize(
        "schema",
        [Capital, Capital.model_json_schema(), Town, FUNCTION],
        ids=["class", "schema", "typed dict", "function"],
    )
    def test_structured_output(self, schema: Any, llm: LLM) -> None:
        model = ChatHardpoint(llm=llm, sampling={"temperature": 0, "max_tokens": 32}).with_structured_output(schema)
        found = model.invoke(f"{QUESTION} Answer in JSON.")
        assert found == (Capital(city="Paris") if schema is Capital else {"city": "Paris"})

    @pytest.mark.parametrize("schema", [Capital, FUNCTION], ids=["class", "function"])
    def test_a_structured_answer_that_was_cut_is_an_error(self, schema: Any, llm: LLM) -> None:
        """LangChain's parsers complete one as if it were whole."""
        model = ChatHardpoint(llm=llm, sampling={"temperature": 0, "max_tokens": 4}).with_structured_output(schema)
        with pytest.raises(OutputParserException, match="finish reason 'length'"):
            model.invoke(QUESTION)
        with pytest.raises(OutputParserException, match="finish reason 'length'"):
            list(model.stream(QUESTION))

    def test_what_it_does_not_do_is_refused_by_name(self, llm: LLM) -> None:
        model = ChatHardpoint(llm=llm, sampling=GREEDY)
        with pytest.raises(InvalidRequest, match="tool calls"):
            model.bind_tools([Capital])
        with pytest.raises(InvalidRequest, match="include_raw"):
            model.with_structured_output(Capital, include_raw=True)
        with pytest.raises(InvalidSamplingParams, match="'best' is not a sampling parameter"):
            model.invoke(QUESTION, best=1)
        with pytest.raises(InvalidSamplingParams, match="log probabilities do not reach LangChain"):
            model.invoke(QUESTION, logprobs=2)
        for kind in (ChatHardpoint, HardpointLLM):
            with pytest.raises(ValidationError, match="temperature"):
                kind(llm=llm, temperature=0)
        with pytest.raises(InvalidSamplingParams, match="a stream has one completion"):
            list(model.stream(QUESTION, n=2, temperature=1))
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(InvalidRequest):
            model.invoke([HumanMessage([{"type": "text", "text": QUESTION}, picture])])


class TestLlamaIndex:
    def test_completions_and_answers(self, llm: LLM, texts: list[str], answer: str) -> None:
        model = LlamaIndexLLM(llm=llm, sampling=GREEDY)
        found = model.complete(PROMPTS[0])
        assert (found.text, found.additional_kwargs["completion_tokens"]) == (texts[0], 8)
        *_, last = parts = list(model.stream_complete(PROMPTS[0]))
        assert last.text == "".join(str(part.delta) for part in parts) == texts[0]
        question = [ChatMessage(role="user", content=QUESTION)]
        assert model.chat(question).message.content == answer
        assert list(model.stream_chat(question))[-1].message.content == answer
        assert model.complete(PROMPTS[0], max_tokens=2).text != texts[0]
        assert (model.metadata.context_window, model.metadata.num_output) == (512, 8)
        endless = LlamaIndexLLM(llm=llm, sampling={"max_tokens": None})
        assert PromptHelper.from_llm_metadata(endless.metadata).num_output < 512

    def test_conversations_are_written_as_the_user_says(self, llm: LLM, texts: list[str]) -> None:
        model = LlamaIndexLLM(llm=llm, sampling=GREEDY, messages_to_prompt=lambda messages: messages[0].content)
        question = [ChatMessage(role="user", content=PROMPTS[0])]
        assert model.chat(question).message.content == texts[0]
        assert list(model.stream_chat(question))[-1].message.content == texts[0]

    def test_side_by_side(self, llm: LLM, texts: list[str], answer: str) -> None:
        model = LlamaIndexLLM(llm=llm, sampling=GREEDY)

        async def all_at_once() -> tuple[Any, ...]:
            question = [ChatMessage(role="user", content=QUESTION)]
            streamed = [part.delta async for part in await model.astream_complete(PROMPTS[0])]
            answered = [part.delta async for part in await model.astream_chat(question)]
            many = await asyncio.gather(*(model.acomplete(prompt) for prompt in PROMPTS), model.achat(question))
            return "".join(map(str, streamed)), "".join(map(str, answered)), many

        streamed, answered, (*many, one) = asyncio.run(all_at_once())
        assert (streamed, answered, one.message.content) == (texts[0], answer, answer)
        assert [found.text for found in many] == texts

    def test_what_it_does_not_do_is_refused_by_name(self, llm: LLM) -> None:
        model = LlamaIndexLLM(llm=llm, sampling=GREEDY)
        picture = ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), ImageBlock(image=b"x")])
        with pytest.raises(InvalidRequest, match="ImageBlock"):
            model.chat([picture])
        with pytest.raises(InvalidSamplingParams, match="one completion"):
            model.complete(PROMPTS[0], n=2, temperature=1)
        with pytest.raises(InvalidSamplingParams, match="log probabilities do not reach LlamaIndex"):
            model.complete(PROMPTS[0], logprobs=2)
        with pytest.raises(ValidationError, match="temperature"):
            LlamaIndexLLM(llm=llm, temperature=0)
        with pytest.raises(InvalidRequest, match="cannot be pickled"):
            pickle.dumps(model)
        assert model.llm is llm


def test_outlines_over_an_engine_of_vllms_interface() -> None:
    stand_in()
    from outlines import from_vllm_offline

    with VLLM("demo", backend="cpu", max_model_len=128) as llm:
        model = from_vllm_offline(llm)
        params = VLLMSamplingParams(temperature=0, max_tokens=16)
        assert model(QUESTION, Literal["Rome", "Paris"], sampling_params=params) == "Paris"
