"""`encode`, `embed`, `classify`, `reward` and `score` of one model each: what they return, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from hardpoint import LLM, AsyncLLM, PoolingParams, ScoringRequestOutput
from hardpoint.engine.inputs import PromptProcessor
from hardpoint.interfaces.errors import (
    ConfigError,
    EmptyPrompt,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    UnsupportedArchitecture,
)
from tests.vllm_scripts.models import SHAPE, write_tokenizer

MakeEngine = Callable[..., Any]
QUERY, TEXTS = "who is it", ["a first text", "the second one", "a third"]
PAIRS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def save(folder: Path, architecture: str, kind: str, **values: Any) -> Any:
    """Write a seeded float32 model with a tokenizer, which separates the texts of a pair by `</s>`, and return it."""
    import transformers

    vocab_size = write_tokenizer(folder, pairs=True)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, "vocab_size": vocab_size, **values})
    torch.manual_seed(1)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model


def with_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def logits(model: Any, tokens: list[int], **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), **inputs).logits[0].numpy()


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine) -> Iterator[LLM]:
    """A decoder without a head, whose embeddings may be cut."""
    folder = tmp_path_factory.mktemp("embeds")
    save(folder, "LlamaModel", "llama")
    with_config(folder, matryoshka_dimensions=[8, 32, 64])
    with make_engine(str(folder), max_model_len=96) as llm:
        yield llm


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine) -> Iterator[tuple[LLM, Any]]:
    """A cross-encoder, and the same as transformers runs it."""
    folder = tmp_path_factory.mktemp("scores")
    model = save(
        folder,
        "BertForSequenceClassification",
        "bert",
        num_key_value_heads=4,
        id2label={0: "score"},
        label2id={"score": 0},
    )
    with make_engine(str(folder), max_model_len=64) as llm:
        yield llm, model


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine) -> Iterator[tuple[LLM, Any]]:
    """A head of three labels for each token."""
    folder = tmp_path_factory.mktemp("labels")
    names = {0: "none", 1: "person", 2: "place"}
    model = save(folder, "BertForTokenClassification", "bert", num_key_value_heads=4, id2label=names)
    with make_engine(str(folder), max_model_len=64) as llm:
        yield llm, model


def sigmoid(x: Any) -> Any:
    return torch.sigmoid(torch.as_tensor(x)).numpy()


def test_embeddings_are_those_of_encode_cut_and_then_normalised(encoder: LLM) -> None:
    (plain,) = encoder.embed(QUERY, PoolingParams(use_activation=False))
    whole = plain.outputs.embedding
    assert plain.outputs.hidden_size == 64
    (encoded,) = encoder.encode(QUERY, pooling_task="embed")
    close(encoded.outputs.data, whole / np.linalg.norm(whole))
    first, second = encoder.embed([QUERY, QUERY], [PoolingParams(dimensions=8), PoolingParams()])
    close(first.outputs.embedding, whole[:8] / np.linalg.norm(whole[:8]))
    close(second.outputs.embedding, encoded.outputs.data)


def test_each_token_has_an_embedding(encoder: LLM) -> None:
    (found,) = encoder.encode(QUERY, PoolingParams(dimensions=32), pooling_task="token_embed")
    assert found.outputs.data.shape == (len(found.prompt_token_ids), 32)
    close(np.linalg.norm(found.outputs.data, axis=1), np.ones(len(found.prompt_token_ids)))
    (last,) = encoder.embed(QUERY, PoolingParams(dimensions=32))
    close(found.outputs.data[-1], last.outputs.embedding)


def test_texts_without_a_head_are_scored_by_the_cosine_of_their_embeddings(encoder: LLM) -> None:
    query, *others = [one.outputs.embedding for one in encoder.embed([QUERY, *TEXTS])]
    scores = encoder.score(QUERY, TEXTS)
    close([one.outputs.score for one in scores], [query @ one for one in others])
    assert isinstance(scores[0], ScoringRequestOutput)
    tokenizer: Any = encoder.get_tokenizer()
    joined = [*tokenizer.encode(QUERY), tokenizer.pad_token_id, *tokenizer.encode(TEXTS[0])]
    assert list(scores[0].prompt_token_ids) == joined
    pairs = encoder.score([QUERY, TEXTS[1]], TEXTS[:2])
    close([one.outputs.score for one in pairs], [query @ others[0], 1.0])


def test_a_head_with_one_label_scores_two_texts_as_one_prompt(scorer: tuple[LLM, Any]) -> None:
    llm, model = scorer
    tokenizer: Any = llm.get_tokenizer()
    scores, plain = llm.score(QUERY, TEXTS), llm.score(QUERY, TEXTS, pooling_params=PoolingParams(use_activation=False))
    for text, score, logit in zip(TEXTS, scores, plain, strict=True):
        pair = tokenizer(QUERY, text, return_token_type_ids=True)
        assert list(score.prompt_token_ids) == pair["input_ids"]
        expected = logits(model, pair["input_ids"], token_type_ids=torch.tensor([pair["token_type_ids"]]))
        close(logit.outputs.score, expected[0])
        close(score.outputs.score, sigmoid(expected[0]))


def test_a_text_that_is_cut_keeps_its_special_tokens_and_what_it_begins_with(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    save(tmp_path, "BertModel", "bert", num_key_value_heads=4)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.save(str(tmp_path / "tokenizer.json"))
    with make_engine(str(tmp_path), max_model_len=32) as llm:
        tokenizer: Any = llm.get_tokenizer()
        for count in (3, 20, -1):
            (found,) = llm.embed("a third " * 9, PoolingParams(truncate_prompt_tokens=count))
            expected = tokenizer("a third " * 9, truncation=True, max_length=32 if count == -1 else count)["input_ids"]
            assert list(found.prompt_token_ids) == expected
        from_left = AutoTokenizer.from_pretrained(tmp_path, truncation_side="left")
        for count in (3, 20, 73):
            expected = from_left("a third " * 9, truncation=True, max_length=count)["input_ids"]
            cut = PromptProcessor(tokenizer, len(tokenizer), 100)("a third " * 9, truncate=count)
            assert cut.token_ids == expected
        tokens = [5, 6, 7, 8]
        (found,) = llm.embed({"prompt_token_ids": tokens}, PoolingParams(truncate_prompt_tokens=3))
        assert list(found.prompt_token_ids) == tokens[-3:]


@pytest.mark.parametrize("texts", [(QUERY, "a third " * 9), ("a first text " * 9, QUERY), ("ab", "cd")])
def test_a_pair_is_cut_as_transformers_cuts_it(scorer: tuple[LLM, Any], texts: tuple[str, str]) -> None:
    llm, model = scorer
    tokenizer: Any = llm.get_tokenizer()
    for count in (5, 12, 33, 64):
        cut = PoolingParams(truncate_prompt_tokens=-1 if count == 64 else count)
        (score,) = llm.score(*texts, pooling_params=cut)
        pair = tokenizer(*texts, truncation="longest_first", max_length=count, return_token_type_ids=True)
        assert list(score.prompt_token_ids) == pair["input_ids"]
        expected = logits(model, pair["input_ids"], token_type_ids=torch.tensor([pair["token_type_ids"]]))
        close(score.outputs.score, sigmoid(expected[0]))
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens leaves nothing of one of the two texts"):
        llm.score(QUERY, "a third " * 9, pooling_params=PoolingParams(truncate_prompt_tokens=2))


def test_a_template_is_written_of_a_document_without_its_end(scorer: tuple[LLM, Any]) -> None:
    llm, _ = scorer
    tokenizer: Any = llm.get_tokenizer()
    (score,) = llm.score(
        QUERY, "a third " * 9, chat_template=PAIRS + "!", pooling_params=PoolingParams(truncate_prompt_tokens=40)
    )
    before = f"<query>{QUERY}<document>"
    assert list(score.prompt_token_ids) == tokenizer.encode(before + ("a third " * 9)[: 39 - len(before)] + "!")
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens leaves nothing of the document"):
        llm.score(QUERY, TEXTS[0], chat_template=PAIRS, pooling_params=PoolingParams(truncate_prompt_tokens=9))


def test_a_template_writes_the_prompt_of_two_texts(scorer: tuple[LLM, Any]) -> None:
    llm, model = scorer
    (score,) = llm.score(QUERY, TEXTS[0], chat_template=PAIRS)
    tokens = llm.get_tokenizer().encode(f"<query>{QUERY}<document>{TEXTS[0]}")  # type: ignore[union-attr]
    assert list(score.prompt_token_ids) == tokens
    close(score.outputs.score, sigmoid(logits(model, tokens)[0]))


def test_labels_of_tokens_are_probabilities_or_logits_and_some_of_them(labeller: tuple[LLM, Any]) -> None:
    llm, model = labeller
    (found,) = llm.encode(QUERY, pooling_task="token_classify")
    expected = logits(model, list(found.prompt_token_ids))
    weights = np.exp(expected)
    close(found.outputs.data, weights / weights.sum(-1, keepdims=True))
    tag = found.prompt_token_ids[2]
    params = PoolingParams(use_activation=False, step_tag_id=tag, returned_token_ids=[2, 0])
    (some,) = llm.reward(QUERY, params)
    rows = [row for row, token in enumerate(found.prompt_token_ids) if token == tag]
    close(some.outputs.data, expected[rows][:, [2, 0]])


def test_labels_of_texts_and_their_tokens(tmp_path: Path, make_engine: MakeEngine) -> None:
    names = {0: "low", 1: "middle", 2: "high"}
    model = save(tmp_path, "LlamaForSequenceClassification", "llama", id2label=names, pad_token_id=None)
    with make_engine(str(tmp_path), max_model_len=64) as llm:
        (found,) = llm.classify(QUERY)
        expected = logits(model, list(found.prompt_token_ids))
        weights = np.exp(expected)
        close(found.outputs.probs, weights / weights.sum())
        assert found.outputs.num_classes == 3
        (of_tokens,) = llm.encode(QUERY, PoolingParams(use_activation=False), pooling_task="token_classify")
        assert of_tokens.outputs.data.shape == (len(found.prompt_token_ids), 3)
        close(of_tokens.outputs.data[-1], expected)
        (reward,) = llm.reward(QUERY)
        close(reward.outputs.data, found.outputs.probs)
        with pytest.raises(InvalidRequest, match=r"3 labels of a text\. Use classify"):
            llm.score(QUERY, TEXTS)


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, np.tanh),
        ({"problem_type": "multi_label_classification"}, sigmoid),
        ({"problem_type": ["regression"]}, lambda x: np.exp(x) / np.exp(x).sum()),
    ],
)
def test_the_model_s_files_say_what_is_returned_of_labels(values: dict[str, Any], activation: Any) -> None:
    from hardpoint.engine.pooling import PoolingModel
    from hardpoint.models.config import ModelConfig
    from hardpoint.models.pooling import PoolingFiles, pooling_defaults

    config = ModelConfig("BertForSequenceClassification", {"num_labels": 2, **values})
    defaults = pooling_defaults(config, PoolingFiles())
    model = PoolingModel(_info(num_labels=2), defaults)
    pooled = np.array([0.5, -90.0], np.float32)
    close(model.finish(model.plan(None), [1, 2], pooled), activation(pooled))


def test_an_activation_of_labels_that_is_not_known_is_refused() -> None:
    from hardpoint.models.config import ModelConfig
    from hardpoint.models.pooling import PoolingFiles, pooling_defaults

    values = {"num_labels": 1, "sentence_transformers": {"activation_fn": "my.Own"}}
    with pytest.raises(UnsupportedArchitecture, match=r"my\.Own"):
        pooling_defaults(ModelConfig("BertForSequenceClassification", values), PoolingFiles())
    with pytest.raises(ModelError, match="embeddings have 4 elements"):
        pooling_defaults(ModelConfig("BertModel", {"hidden_size": 4, "matryoshka_dimensions": [5]}), PoolingFiles())


def _info(**values: Any) -> Any:
    from types import SimpleNamespace

    from hardpoint.interfaces.batch import Pooling

    return SimpleNamespace(architecture="BertForSequenceClassification", pooling=Pooling.CLS, **values)


def test_what_embeddings_cannot_be_is_refused(encoder: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"dimensions=7\. Give 8, 32, 64"):
        encoder.embed(QUERY, PoolingParams(dimensions=7))
    with pytest.raises(InvalidRequest, match="dimensions=65"):
        encoder.encode(QUERY, PoolingParams(dimensions=65), pooling_task="token_embed")
    with pytest.raises(InvalidRequest, match="no head that classifies"):
        encoder.classify(QUERY)
    with pytest.raises(InvalidRequest, match="no head that classifies"):
        encoder.reward(QUERY)
    with pytest.raises(InvalidRequest, match="the call is for task='embed'"):
        encoder.embed(QUERY, PoolingParams(task="token_embed"))
    with pytest.raises(InvalidRequest, match="step_tag_id is for task='token_classify'"):
        encoder.embed(QUERY, PoolingParams(step_tag_id=3))
    with pytest.raises(InvalidRequest, match="pooling is for a task of texts"):
        encoder.encode(QUERY, PoolingParams(pooling="mean"), pooling_task="token_embed")
    with pytest.raises(InvalidRequest, match="task"):
        encoder.encode(QUERY, pooling_task="score")
    with pytest.raises(InvalidRequest, match="token_embed"):
        PoolingParams(pooling="all")
    with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
        encoder.embed(TEXTS[:2], [PoolingParams()])
    with pytest.raises(EmptyPrompt):
        encoder.embed([[]])
    assert encoder.embed([]) == []


def test_pairs_that_cannot_be_scored_are_refused(
    encoder: LLM, scorer: tuple[LLM, Any], labeller: tuple[LLM, Any]
) -> None:
    for llm in (encoder, scorer[0]):
        with pytest.raises(InvalidRequest, match="2 and 3 texts"):
            llm.score(TEXTS[:2], TEXTS)
        with pytest.raises(InvalidRequest, match="data_1 has no text"):
            llm.score([], TEXTS)
        with pytest.raises(InvalidRequest, match="data_2 has no text"):
            llm.score(QUERY, [])
        with pytest.raises(InvalidRequest, match="data_2 must be a text or a list of texts"):
            llm.score(QUERY, [5])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="data_2 must be a text or a list of texts"):
            llm.score(QUERY, {"content": QUERY})  # type: ignore[arg-type]
        with pytest.raises(PromptTooLong):
            llm.score(QUERY, ["long " * 60])
    with pytest.raises(InvalidRequest, match="chat_template is of models whose head"):
        encoder.score(QUERY, TEXTS, chat_template=PAIRS)
    with pytest.raises(InvalidRequest, match="the call is for task='classify'"):
        scorer[0].score(QUERY, TEXTS, pooling_params=PoolingParams(task="embed"))
    with pytest.raises(InvalidRequest, match="dimensions is for embeddings"):
        scorer[0].classify(QUERY, PoolingParams(dimensions=2))
    with pytest.raises(InvalidRequest, match="3 labels of each token"):
        labeller[0].score(QUERY, TEXTS)
    with pytest.raises(InvalidRequest, match="token_classify"):
        labeller[0].classify(QUERY)
    with pytest.raises(InvalidRequest, match="below the 3 labels"):
        labeller[0].reward(QUERY, PoolingParams(returned_token_ids=[3]))


def test_awaited_results_are_the_same(scorer: tuple[LLM, Any]) -> None:
    (expected,) = scorer[0].classify(QUERY)

    async def asked() -> Any:
        async with await AsyncLLM.create(scorer[0].engine.config.model, backend="cpu", max_model_len=64) as llm:
            with pytest.raises(InvalidRequest, match="the call is for task='embed'"):
                await llm.embed(QUERY, PoolingParams(task="classify"))
            return await llm.encode(QUERY)

    close(asyncio.run(asked()).outputs.data, expected.outputs.probs)
