"""Tokenizers come from a folder's files or from a GGUF file's vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import save_tiny, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hardpoint.interfaces.errors import ModelError
from hardpoint.models import load_tokenizer, open_model

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


def _gguf(path: Path, model: str, tokens: list[str], merges: list[str] | None = None, **options: object) -> None:
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
    writer.add_token_types([3 if token.startswith("<") and token.endswith(">") else 1 for token in tokens])
    if merges is None:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    else:
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre("default")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(int(str(options.get("eos", 2))))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_sentencepiece_vocabulary_begins_with_bos(tmp_path: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁moon",
        "▁mo",
        "on",
        "▁m",
        "▁",
        "m",
        "o",
        "n",
    ]
    _gguf(tmp_path / "model.gguf", "llama", pieces)
    tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    tokens = tokenizer("moon").input_ids
    assert tokens[0] == tokenizer.bos_token_id == 1
    assert tokens[1:] == [pieces.index("▁moon")]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "moon"


def test_a_byte_level_vocabulary_has_no_bos_unless_told(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "mo", "moon", "on"]
    _gguf(tmp_path / "model.gguf", "gpt2", tokens, ["m o", "o n", "mo on"])
    tokenizer = load_tokenizer(open_model(str(tmp_path / "model.gguf")))
    assert tokenizer("moon").input_ids == [tokens.index("moon")]
    assert isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    assert tokenizer.decode(tokenizer("mond, ünd 🙂").input_ids) == "mond, ünd 🙂"


def test_special_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    _gguf(tmp_path / "model.gguf", "gpt2", ["<unk>", "<s>", "a", "b", "ab"], ["a b"], eos=77)
    with pytest.raises(ModelError, match="eos_token 77"):
        load_tokenizer(open_model(str(tmp_path / "model.gguf")))
