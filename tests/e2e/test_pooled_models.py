"""Encoders, and heads that classify, as engines run them: each against transformers' code on the same seeded weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, PoolingParams
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    CorruptWeights,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    UnsupportedArchitecture,
)

VOCAB = 120
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 98,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
WINDOWS = {"local_attention": 12, "global_attn_every_n_layers": 2, "norm_bias": True}
BOTH_SIDES = {
    "sliding_window": 12,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
LABELS = {"id2label": {0: "low", 1: "middle", 2: "high"}, "label2id": {"low": 0, "middle": 1, "high": 2}}
ONE = {"id2label": {0: "score"}, "label2id": {"score": 0}}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "bert", {}),
    "roberta": ("RobertaModel", "roberta", {"type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "modernbert", WINDOWS),
    "modernbert-biases": ("ModernBertModel", "modernbert", {**WINDOWS, "attention_bias": True, "norm_bias": False}),
    "embedding-gemma": ("Gemma3TextModel", "gemma3_text", {**DECODER, **BOTH_SIDES}),
    "qwen3": ("Qwen3Model", "qwen3", DECODER),
}
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "bert", LABELS),
    "bert-two-labels": ("BertForSequenceClassification", "bert", {}),
    "bert-tokens": ("BertForTokenClassification", "bert", LABELS),
    "roberta": ("RobertaForSequenceClassification", "roberta", {"type_vocab_size": 1, **LABELS}),
    "roberta-tokens": ("RobertaForTokenClassification", "roberta", {"type_vocab_size": 1, **LABELS}),
    "xlm-roberta-scores": ("XLMRobertaForSequenceClassification", "xlm-roberta", {"type_vocab_size": 1, **ONE}),
    "modernbert": ("ModernBertForSequenceClassification", "modernbert", {**WINDOWS, **LABELS}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        "modernbert",
        {**WINDOWS, **LABELS, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert-tokens": ("ModernBertForTokenClassification", "modernbert", {**WINDOWS, **LABELS}),
    "llama": ("LlamaForSequenceClassification", "llama", {**DECODER, **LABELS}),
    "llama-tokens": ("LlamaForTokenClassification", "llama", {**DECODER, **LABELS}),
    "qwen3-reward": ("Qwen3ForSequenceClassification", "qwen3", {**DECODER, **ONE}),
    "gemma3": (
        "Gemma3TextForSequenceClassification",
        "gemma3_text",
        {**DECODER, **BOTH_SIDES, "use_bidirectional_attention": False, **LABELS},
    ),
}
LENGTHS = [1, 2, 40, 7, 96, 13]

MakeEngine = Callable[..., Any]


def save(folder: Path, architecture: str, kind: str, options: dict[str, Any]) -> Any:
    """Write a seeded float32 model and return it, as transformers runs it."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **options})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the published initialisation, where every norm is 1 and every bias 0.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def whole(model: Any, tokens: list[int], **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), **inputs)


def pooled(llm: LLM, texts: list[list[int]], **params: Any) -> list[np.ndarray[Any, Any]]:
    outputs = llm.embed([{"prompt_token_ids": one} for one in texts], PoolingParams(**params))
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_and_what_is_pooled_of_them_are_transformers_in_any_batch(
    tmp_path: Path, make_engine: MakeEngine, name: str
) -> None:
    model, texts = save(tmp_path, *ENCODERS[name]), prompts()
    expected = [whole(model, one).last_hidden_state[0] for one in texts]
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        assert llm.info.path == "lean" or name == "qwen3"
        for pooling, pick in (
            ("all", lambda x: x),
            ("cls", lambda x: x[0]),
            ("last", lambda x: x[-1]),
            ("mean", lambda x: x.mean(0)),
        ):
            for found, hidden in zip(pooled(llm, texts, pooling=pooling, normalize=False), expected, strict=True):
                np.testing.assert_allclose(found, pick(hidden).numpy(), atol=2e-4, rtol=1e-3)
        assert llm.engine.stats().blocks_used == 0


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_labels_are_transformers(tmp_path: Path, make_engine: MakeEngine, name: str) -> None:
    model, texts = save(tmp_path, *HEADS[name]), prompts()
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        for found, tokens in zip(pooled(llm, texts, task="classify"), texts, strict=True):
            expected = whole(model, tokens).logits[0].numpy()
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)


def test_a_pair_of_texts_has_types_of_tokens(tmp_path: Path, make_engine: MakeEngine) -> None:
    """BERT's cross-encoders tell the two texts apart; both in a batch with others that have one text."""
    model = save(tmp_path, *HEADS["bert"])
    tokens, second = prompts([9])[0], 4
    pair = TokenizedPrompt(None, tokens, second_text=second)
    types = torch.tensor([[0] * second + [1] * (len(tokens) - second)])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        outputs = llm.embed([pair, tokens, pair], PoolingParams(task="classify"))
    for output, given in zip(outputs, (types, types * 0, types), strict=True):
        expected = whole(model, tokens, token_type_ids=given).logits[0].numpy()
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"engine_process": True}], ids=["two-ranks", "another-process"]
)
def test_an_encoder_in_other_processes(tmp_path: Path, make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    model, tokens = save(tmp_path, *HEADS["bert"]), prompts([9])[0]
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None, **settings) as llm:
        outputs = llm.embed([TokenizedPrompt(None, tokens, second_text=4), tokens], PoolingParams(task="classify"))
    for output, second in zip(outputs, (4, 9), strict=True):
        types = torch.tensor([[0] * second + [1] * (9 - second)])
        expected = whole(model, tokens, token_type_ids=types).logits[0].numpy()
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-4, rtol=1e-3)


def test_an_encoder_is_not_divided_into_stages(tmp_path: Path, make_engine: MakeEngine) -> None:
    save(tmp_path, *ENCODERS["bert"])
    with (
        pytest.raises(CapabilityRefused, match=r"an encoder is one stage.*pipeline_parallel_size can be 1$"),
        make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None, pipeline_parallel_size=2),
    ):
        pass


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def sentence_transformers(folder: Path, *, mode: str = "pooling_mode_mean_tokens", normalize: bool = True) -> None:
    """Write the files that say: this pooling, two dense layers, and embeddings of the length 1."""
    from safetensors.torch import save_file

    kinds = ["models.Transformer", "models.Pooling", "models.Dense", "models.Dense", "models.Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    write(folder / "modules.json", modules if normalize else modules[:-1])
    write(folder / "sentence_bert_config.json", {"max_seq_length": 50})
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 48, mode: True, "include_prompt": True})
    for number, (inputs, outputs, bias, kind) in enumerate(((48, 96, False, "Identity"), (96, 20, True, "Tanh")), 2):
        settings = {"in_features": inputs, "out_features": outputs, "bias": bias}
        path = folder / f"{number}_Dense"
        write(path / "config.json", {**settings, "activation_function": f"torch.nn.modules.activation.{kind}"})
        tensors = {"linear.weight": torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(number)) * 0.3}
        if bias:
            tensors["linear.bias"] = torch.linspace(-1, 1, outputs)
        save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(("name", "normalize"), [("embedding-gemma", True), ("roberta", False)])
def test_files_of_sentence_transformers_say_how_embeddings_are_made(
    tmp_path: Path, make_engine: MakeEngine, name: str, normalize: bool
) -> None:
    from safetensors.torch import load_file

    model = save(tmp_path, *ENCODERS[name])
    sentence_transformers(tmp_path, normalize=normalize)
    first, second = (load_file(tmp_path / f"{number}_Dense" / "model.safetensors") for number in (2, 3))
    texts = prompts([3, 50])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        outputs = [output.outputs.embedding for output in llm.embed(texts)]
        with pytest.raises(PromptTooLong, match="51 tokens"):
            llm.embed(prompts([51]))
        llm.sleep(level=1, tier="source")
        llm.wake_up()
        np.testing.assert_array_equal(llm.embed(texts[0])[0].outputs.embedding, outputs[0])
    for found, tokens in zip(outputs, texts, strict=True):
        mean = whole(model, tokens).last_hidden_state[0].mean(0) @ first["linear.weight"].T
        expected = torch.tanh(mean @ second["linear.weight"].T + second["linear.bias"])
        expected = torch.nn.functional.normalize(expected, dim=0) if normalize else expected
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


UNUSABLE: dict[str, tuple[str, Any, type[Exception], str]] = {
    "unknown-module": ("modules.json", [{"path": "", "type": "my.Router"}], UnsupportedArchitecture, "my.Router"),
    "module-of-no-type": ("modules.json", [{"path": ""}], ModelError, "module"),
    "no-list": ("modules.json", {"path": ""}, ModelError, "dict"),
    "unknown-pooling": ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, UnsupportedArchitecture, "max"),
    "two-poolings": (
        "1_Pooling/config.json",
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        UnsupportedArchitecture,
        "mean_tokens, cls_token",
    ),
    "no-pooling": ("1_Pooling/config.json", {}, UnsupportedArchitecture, "no pooling_mode"),
    "dense-of-another-size": ("2_Dense/config.json", {"in_features": 40, "out_features": 96}, ModelError, "40 inputs"),
    "dense-of-no-size": ("2_Dense/config.json", {"in_features": 48, "out_features": "all"}, ModelError, "'all'"),
    "unknown-activation": (
        "3_Dense/config.json",
        {"in_features": 96, "out_features": 20, "activation_function": "torch.nn.modules.activation.CELU"},
        UnsupportedArchitecture,
        "CELU",
    ),
    "length": ("sentence_bert_config.json", {"max_seq_length": -3}, ModelError, "-3"),
    "labels": ("config.json", {"num_labels": 2}, ModelError, "names in id2label, 3"),
    "labels-of-the-weights": ("config.json", {"id2label": {"0": "a", "1": "b"}}, CorruptWeights, "classifier.weight"),
    "positions": ("config.json", {"position_embedding_type": "relative_key"}, UnsupportedArchitecture, "relative_key"),
    "activation": ("config.json", {"hidden_act": "swoosh"}, UnsupportedArchitecture, "swoosh"),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    save(folder, *HEADS["bert"])
    sentence_transformers(folder)
    return folder


@pytest.mark.parametrize("name", UNUSABLE)
def test_files_that_cannot_be_are_refused(tmp_path: Path, published: Path, make_engine: MakeEngine, name: str) -> None:
    file, changes, error, words = UNUSABLE[name]
    folder = Path(shutil.copytree(published, tmp_path / "model"))
    found = json.loads((folder / file).read_text())
    write(folder / file, {**found, **changes} if file == "config.json" else changes)
    with pytest.raises(error, match=words), make_engine(str(folder), skip_tokenizer_init=True, max_model_len=None):
        pass


def test_what_a_model_has_no_head_for_is_refused(tmp_path: Path, make_engine: MakeEngine) -> None:
    save(tmp_path, *ENCODERS["bert"])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        with pytest.raises(InvalidRequest, match="no head that classifies"):
            llm.embed(prompts([3]), PoolingParams(task="classify"))
        with pytest.raises(InvalidRequest, match="no language-model head"):
            llm.generate(prompts([3]))
        with pytest.raises(InvalidRequest, match="max"):
            PoolingParams(pooling="max")
        with pytest.raises(PromptTooLong, match="99 tokens"):
            llm.embed(prompts([99]))


def test_names_of_published_encoders(tmp_path: Path, make_engine: MakeEngine) -> None:
    """A masked language model's head is left out, and norms may be called gamma and beta; positions begin after the padding's row."""
    from safetensors.torch import load_file, save_file

    model = save(tmp_path, "BertForMaskedLM", "bert", {})
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        next((name.replace(ours, theirs) for ours, theirs in old.items() if name.endswith(ours)), name): tensor
        for name, tensor in load_file(file).items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in tensors
    save_file(tensors, file)
    (tokens,) = prompts([11])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        (found,) = pooled(llm, [tokens], normalize=False)
        assert llm.engine.update_weights([("bert.embeddings.LayerNorm.gamma", torch.zeros(48))]) == 1
    np.testing.assert_allclose(found, whole(model.bert, tokens).last_hidden_state[0, 0], atol=2e-4, rtol=1e-3)


def test_roberta_counts_positions_after_those_of_padding(tmp_path: Path, make_engine: MakeEngine) -> None:
    save(tmp_path, *ENCODERS["roberta"])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        assert llm.info.max_model_len == 96
        with pytest.raises(PromptTooLong, match="97 tokens"):
            llm.embed(prompts([97]))
