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
    ConfigError,
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
    "llama-both-sides": ("LlamaModel", "llama", {**DECODER, "is_causal": False}),
    "mistral-both-sides": ("MistralModel", "mistral", {**DECODER, "is_causal": False, "sliding_window": None}),
    "granite-both-sides": ("GraniteModel", "granite", {**DECODER, "is_causal": False, "residual_multiplier": 0.5}),
    "qwen2-both-sides": ("Qwen2Model", "qwen2", {**DECODER, "is_causal": False}),
    "qwen3-both-sides": ("Qwen3Model", "qwen3", {**DECODER, "is_causal": False}),
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
    outputs = llm.encode([{"prompt_token_ids": one} for one in texts], PoolingParams(**params))
    return [output.outputs.data for output in outputs]


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_and_what_is_pooled_of_them_are_transformers_in_any_batch(
    tmp_path: Path, make_engine: MakeEngine, name: str
) -> None:
    model, texts = save(tmp_path, *ENCODERS[name]), prompts()
    expected = [whole(model, one).last_hidden_state[0] for one in texts]
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        assert llm.info.path == "modules" or name == "qwen3"
        for params, pick in (
            ({"task": "token_embed"}, lambda x: x),
            ({"pooling": "cls"}, lambda x: x[0]),
            ({"pooling": "last"}, lambda x: x[-1]),
            ({"pooling": "mean"}, lambda x: x.mean(0)),
        ):
            for found, hidden in zip(pooled(llm, texts, use_activation=False, **params), expected, strict=True):
                np.testing.assert_allclose(found, pick(hidden).numpy(), atol=2e-4, rtol=1e-3)
        assert llm.engine.stats().blocks_used == 0


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_labels_are_transformers(tmp_path: Path, make_engine: MakeEngine, name: str) -> None:
    model, texts = save(tmp_path, *HEADS[name]), prompts()
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        for found, tokens in zip(pooled(llm, texts, use_activation=False), texts, strict=True):
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
        outputs = llm.encode([pair, tokens, pair], PoolingParams(use_activation=False))
    for output, given in zip(outputs, (types, types * 0, types), strict=True):
        expected = whole(model, tokens, token_type_ids=given).logits[0].numpy()
        np.testing.assert_allclose(output.outputs.data, expected, atol=2e-4, rtol=1e-3)


def test_a_model_with_one_type_does_not_tell_two_texts_apart(tmp_path: Path, make_engine: MakeEngine) -> None:
    model, (tokens,) = save(tmp_path, *HEADS["roberta"]), prompts([9])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        (output,) = llm.encode(TokenizedPrompt(None, tokens, second_text=4), PoolingParams(use_activation=False))
    np.testing.assert_allclose(output.outputs.data, whole(model, tokens).logits[0].numpy(), atol=2e-4, rtol=1e-3)


def test_a_pair_that_is_cut_keeps_the_types_of_its_tokens(tmp_path: Path, make_engine: MakeEngine) -> None:
    model = save(tmp_path, *HEADS["bert"])
    tokens, second = prompts([9])[0], 4
    pair = TokenizedPrompt(None, tokens, second_text=second)
    types = torch.tensor([[0] * second + [1] * (len(tokens) - second)])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        for kept in (6, 5, 3, 1):
            (output,) = llm.encode(pair, PoolingParams(use_activation=False, truncate_prompt_tokens=kept))
            expected = whole(model, tokens[-kept:], token_type_ids=types[:, -kept:]).logits[0].numpy()
            np.testing.assert_allclose(output.outputs.data, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"engine_process": True}], ids=["two-ranks", "another-process"]
)
def test_an_encoder_in_other_processes(tmp_path: Path, make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    model, tokens = save(tmp_path, *HEADS["bert"]), prompts([9])[0]
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None, **settings) as llm:
        outputs = llm.encode(
            [TokenizedPrompt(None, tokens, second_text=4), tokens], PoolingParams(use_activation=False)
        )
    for output, second in zip(outputs, (4, 9), strict=True):
        types = torch.tensor([[0] * second + [1] * (9 - second)])
        expected = whole(model, tokens, token_type_ids=types).logits[0].numpy()
        np.testing.assert_allclose(output.outputs.data, expected, atol=2e-4, rtol=1e-3)


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


def test_a_model_without_a_head_that_runs_by_transformers_code_embeds(tmp_path: Path, make_engine: MakeEngine) -> None:
    model, texts = save(tmp_path, "GPT2Model", "gpt2", {"n_positions": 98}), prompts([7, 13])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        assert llm.info.path == "transformers"
        for found, tokens in zip(pooled(llm, texts, use_activation=False, pooling="mean"), texts, strict=True):
            expected = whole(model, tokens).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(found, expected.numpy(), atol=2e-4, rtol=1e-3)


def test_a_window_of_one_side_is_modernberts_too(tmp_path: Path, make_engine: MakeEngine) -> None:
    """transformers takes `sliding_window` for the half of `local_attention`."""
    from transformers import AutoModel

    save(tmp_path, *ENCODERS["modernbert"])
    config = tmp_path / "config.json"
    write(config, json.loads(config.read_text()) | {"sliding_window": 4})
    model, (tokens,) = AutoModel.from_pretrained(tmp_path).eval(), prompts([40])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        (found,) = pooled(llm, [tokens], use_activation=False, pooling="mean")
    expected = whole(model, tokens).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_texts_are_read_as_the_transformers_own_file_says(tmp_path: Path, make_engine: MakeEngine, name: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(tmp_path, *ENCODERS["bert"])
    sentence_transformers(tmp_path)
    (tmp_path / "sentence_bert_config.json").unlink()
    write(tmp_path / f"sentence_{name}_config.json", {"max_seq_length": 5, "do_lower_case": True})
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 3, "moon": 4, "Moon": 5}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    with make_engine(str(tmp_path), max_model_len=None) as llm:
        (made,) = llm.embed("THE Moon")
        assert made.prompt_token_ids == [3, 4]
        with pytest.raises(PromptTooLong, match="6 tokens"):
            llm.embed("the moon " * 3)


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
    "case": ("sentence_bert_config.json", {"do_lower_case": "yes"}, ModelError, "do_lower_case is 'yes'"),
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
            llm.classify(prompts([3]))
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
        (found,) = pooled(llm, [tokens], use_activation=False)
        assert llm.engine.update_weights([("bert.embeddings.LayerNorm.gamma", torch.zeros(48))]) == 1
    np.testing.assert_allclose(found, whole(model.bert, tokens).last_hidden_state[0, 0], atol=2e-4, rtol=1e-3)


def test_roberta_counts_positions_after_those_of_padding(tmp_path: Path, make_engine: MakeEngine) -> None:
    save(tmp_path, *ENCODERS["roberta"])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        assert llm.info.max_model_len == 96
        with pytest.raises(PromptTooLong, match="97 tokens"):
            llm.embed(prompts([97]))


def test_tokens_of_padding_in_a_text_have_the_position_of_padding(tmp_path: Path, make_engine: MakeEngine) -> None:
    """And those behind them are not moved on; of BERT they are tokens as others are."""
    for name in ("roberta", "bert"):
        model, texts = save(tmp_path / name, *ENCODERS[name]), prompts([5, 9, 40])
        texts[0][0] = texts[1][3] = texts[1][4] = texts[2][-1] = SHAPE["pad_token_id"]
        with make_engine(str(tmp_path / name), skip_tokenizer_init=True, max_model_len=None) as llm:
            for found, tokens in zip(pooled(llm, texts, task="token_embed", use_activation=False), texts, strict=True):
                expected = whole(model, tokens).last_hidden_state[0].numpy()
                np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)


def reward_model(folder: Path, architecture: str, labels: int) -> Callable[[list[int]], Any]:
    """Write a decoder with a head of two layers, as Qwen2.5-Math-RM and -PRM are published, and return what it gives for each token."""
    from safetensors.torch import load_file, save_file

    model = save(folder, "Qwen2Model", "qwen2", DECODER)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "score.0.weight": (48, 48),
        "score.0.bias": (48,),
        "score.2.weight": (labels, 48),
        "score.2.bias": (labels,),
    }
    head = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    trunk = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**trunk, **head, "lm_head.weight": torch.zeros(VOCAB, 48)}, folder / "model.safetensors")
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]})

    def rewards(tokens: list[int]) -> Any:
        hidden = whole(model, tokens).last_hidden_state[0]
        inner = torch.relu(hidden @ head["score.0.weight"].T + head["score.0.bias"])
        return (inner @ head["score.2.weight"].T + head["score.2.bias"]).numpy()

    return rewards


@pytest.mark.parametrize(("architecture", "labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_reward_models_reward_each_token(
    tmp_path: Path, make_engine: MakeEngine, architecture: str, labels: int
) -> None:
    expected, texts = reward_model(tmp_path, architecture, labels), prompts()
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None) as llm:
        found = [one.outputs.data for one in llm.reward(texts, PoolingParams(use_activation=False))]
        for values, tokens in zip(found, texts, strict=True):
            np.testing.assert_allclose(values, expected(tokens), atol=2e-4, rtol=1e-3)
        step = texts[2][5]
        (steps,) = llm.reward([texts[2]], PoolingParams(step_tag_id=step))
        rows = [row for row, token in enumerate(texts[2]) if token == step]
        logits = torch.from_numpy(found[2][rows])
        probabilities = torch.sigmoid(logits) if labels == 1 else logits.softmax(-1)
        np.testing.assert_allclose(steps.outputs.data, probabilities.numpy(), atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_s_head_labels_texts(tmp_path: Path, make_engine: MakeEngine, tied: bool) -> None:
    """Qwen3-Reranker as it was published: the probability of "yes" among "no" and "yes", or the logits of some tokens."""
    model = save(tmp_path, "Qwen3ForCausalLM", "qwen3", {**DECODER, "tie_word_embeddings": tied})
    texts, (no, yes) = prompts([3, 17]), (31, 77)
    expected = [whole(model, one).logits[0, -1] for one in texts]
    original = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }
    shared = {"skip_tokenizer_init": True, "max_model_len": None}
    with make_engine(str(tmp_path), hf_overrides=original, **shared) as llm:
        for found, logits in zip(llm.classify(texts), expected, strict=True):
            assert found.outputs.probs == pytest.approx([float(logits[[no, yes]].softmax(0)[1])], abs=2e-5)
        llm.sleep(level=1, tier="source")
        llm.wake_up()
        assert llm.classify(texts[0])[0].outputs.probs == pytest.approx(llm.classify(texts)[0].outputs.probs)
        source = "model.embed_tokens.weight" if tied else "lm_head.weight"
        changed = model.state_dict()[source].clone()
        changed[yes] = changed[no]
        llm.engine.update_weights([(source, changed)])
        assert llm.classify(texts[0])[0].outputs.probs == pytest.approx([0.5])
        llm.reload_weights(str(tmp_path))
        (found,) = llm.classify(texts[1])
        assert found.outputs.probs == pytest.approx([float(expected[1][[no, yes]].softmax(0)[1])], abs=2e-5)
    some = {"classifier_from_token": [no, yes, 5], "method": "no_post_processing"}
    with make_engine(str(tmp_path), convert="classify", hf_overrides=some, engine_process=tied, **shared) as llm:
        for found, logits in zip(pooled(llm, texts, use_activation=False), expected, strict=True):
            np.testing.assert_allclose(found, logits[[no, yes, 5]].numpy(), atol=2e-4, rtol=1e-3)


def test_a_language_model_without_its_head_embeds(tmp_path: Path, make_engine: MakeEngine) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", "qwen3", DECODER)
    texts = prompts([3, 17])
    with make_engine(str(tmp_path), skip_tokenizer_init=True, max_model_len=None, runner="pooling") as llm:
        for found, tokens in zip(pooled(llm, texts, use_activation=False), texts, strict=True):
            hidden = whole(model.model, tokens).last_hidden_state[0, -1]
            np.testing.assert_allclose(found, hidden.numpy(), atol=2e-4, rtol=1e-3)
        assert llm.info.weight_bytes < sum(one.nbytes for one in model.parameters())
        with pytest.raises(InvalidRequest, match="no language-model head"):
            llm.generate(texts)


CONVERSIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no-head": ({"convert": "classify"}, CorruptWeights, "score.weight"),
    "no-method": ({"hf_overrides": {"is_original_qwen3_reranker": True}}, ModelError, "classifier_from_token"),
    "no-labels": (
        {"hf_overrides": {"classifier_from_token": [1, 2], "is_original_qwen3_reranker": True}},
        ModelError,
        "architectures is",
    ),
    "one-token": (
        {"convert": "classify", "hf_overrides": {"classifier_from_token": [1], "method": "from_2_way_softmax"}},
        ModelError,
        "no and yes",
    ),
    "no-such-row": (
        {"convert": "classify", "hf_overrides": {"classifier_from_token": [VOCAB, 1], "method": "no_post_processing"}},
        CorruptWeights,
        "rows that the head is made of",
    ),
    "no-such-value": ({"hf_overrides": {"num_hiden_layers": 1}}, ConfigError, "Did you mean 'num_hidden_layers'"),
    "to-generate": ({"convert": "embed", "runner": "generate"}, ConfigError, "Leave convert out"),
    "impossible": ({"hf_overrides": {"num_hidden_layers": -1}}, ModelError, "num_hidden_layers"),
}


@pytest.fixture(scope="module")
def generative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generative")
    save(folder, "Qwen3ForCausalLM", "qwen3", DECODER)
    return folder


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_that_cannot_be_are_refused(generative: Path, make_engine: MakeEngine, name: str) -> None:
    settings, error, words = CONVERSIONS[name]
    with (
        pytest.raises(error, match=words),
        make_engine(str(generative), skip_tokenizer_init=True, max_model_len=None, **settings),
    ):
        pass


def test_a_model_without_a_head_does_not_generate(published: Path, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="runner='generate'"), make_engine(str(published), runner="generate"):
        pass
