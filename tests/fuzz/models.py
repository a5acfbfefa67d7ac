"""Weights: GGUF and safetensors files of tiny models, changed in their structure or in any byte, run as an engine runs them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import save

from hardpoint import LLM, SamplingParams
from hardpoint.models import open_model

from .values import FLOATS, INTEGERS, NESTED, SCALARS, TEXTS, changed, damaged, misplaced, write_json

SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "max_model_len": 32,
    "num_device_blocks": 8,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 2,
    "swap_space": 0,
    "threads": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 1}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8}
TOKENS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(69, 69 + 58)), "Ġ", "th", "he"]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MOST_TOKENS = 4096
"""In the vocabulary of any file here."""
_MOST_BYTES = 1 << 20
"""Of data that are made for a tensor of other dimensions; of larger ones a file has too little."""


def config(family: str) -> dict[str, Any]:
    """Return a tiny configuration."""
    more = {"mixtral": MIXTURE, "gemma2": GEMMA}.get(family, {})
    return {"architectures": [FAMILIES[family]], "model_type": family, **SHAPE, **more}


def use(path: Path, *, has_tokenizer: bool) -> None:
    """Run a model as an engine does."""
    with LLM(str(path), skip_tokenizer_init=not has_tokenizer, **SETTINGS) as llm:
        prompts: list[Any] = [{"prompt_token_ids": [3, 4]}, *(["the"] if has_tokenizer else [])]
        for output in llm.generate(prompts, GREEDY, use_tqdm=False):
            (one,) = output.outputs
            assert one.finish_reason == "error" or 1 <= len(one.token_ids) <= 2
            assert all(0 <= token < _MOST_TOKENS for token in one.token_ids)


# GGUF


@dataclass
class Gguf:
    """A file before it is written.

    Attributes:
        keys: (key, type, value).
        tensors: [name, dimensions as ggml orders them, type, offset, data].
    """

    keys: list[tuple[str, int, Any]]
    tensors: list[list[Any]]
    version: int = 3
    counts: dict[str, int] = field(default_factory=dict)

    def write(self, rng: Random) -> bytes:
        """Return the file's bytes; now and then a length in them is another."""

        wrong_lengths = 0.01 if rng.random() < 0.1 else 0.0

        def text(value: str) -> bytes:
            data = value.encode(errors="surrogatepass")
            length = len(data) if rng.random() >= wrong_lengths else rng.choice(INTEGERS)
            return struct.pack("<Q", length % 2**64) + data

        def one(kind: int, value: Any) -> bytes:
            if kind == _TEXT:
                return text(value if isinstance(value, str) else str(value))
            if kind == _LIST:
                element, items = value
                count = self.counts.get("list", len(items)) if rng.random() < 0.3 else len(items)
                return struct.pack("<IQ", element, count % 2**64) + b"".join(one(element, item) for item in items)
            layout = "<" + _SCALARS.get(kind, "I")
            try:
                return struct.pack(layout, value)
            except (struct.error, OverflowError):
                return rng.randbytes(struct.calcsize(layout))

        head = struct.pack("<I", self.version)
        tensors, keys = (
            self.counts.get(name, len(found)) for name, found in (("tensors", self.tensors), ("keys", self.keys))
        )
        head += struct.pack("<QQ", tensors % 2**64, keys % 2**64)
        for key, kind, value in self.keys:
            head += text(key) + struct.pack("<I", kind) + one(kind, value)
        data = b""
        for name, dims, kind, offset, values in self.tensors:
            offset = len(data) if offset is None else offset
            data += values + b"\0" * (-len(values) % 32)
            head += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d % 2**64) for d in dims)
            head += struct.pack("<IQ", kind % 2**32, offset % 2**64)
        head = b"GGUF" + head
        return head + b"\0" * (-len(head) % 32) + data


def gguf_bases() -> list[Gguf]:
    """Return one file of each kind: architectures, block formats, tokenizers."""
    kinds = GGMLQuantizationType
    return [
        _gguf_base("llama", kinds.F32, "gpt2"),
        _gguf_base("llama", kinds.Q8_0, "llama"),
        _gguf_base("qwen3", kinds.Q4_0, "gpt2"),
        _gguf_base("gemma2", kinds.F16, "llama"),
    ]


def _gguf_base(family: str, kind: GGMLQuantizationType, tokenizer: str | None) -> Gguf:
    shape = config(family)
    names = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    values = [64, 2, 32, 32, 2]
    keys: list[tuple[str, int, Any]] = [("general.architecture", _TEXT, family), ("general.alignment", 4, 32)]
    keys += [(f"{family}.{name}", 4, value) for name, value in zip(names, values, strict=True)]
    keys += [
        (f"{family}.attention.head_count_kv", 4, 1),
        (f"{family}.attention.key_length", 4, 16),
        (f"{family}.attention.layer_norm_rms_epsilon", 6, 1e-5),
        (f"{family}.rope.freq_base", 6, 1e4),
        ("tokenizer.ggml.eos_token_id", 4, 2),
    ]
    if family == "gemma2":
        keys.append(("gemma2.attention.sliding_window", 4, 8))
    if tokenizer is not None:
        keys += [
            ("tokenizer.ggml.model", _TEXT, tokenizer),
            ("tokenizer.ggml.tokens", _LIST, (_TEXT, TOKENS)),
            ("tokenizer.ggml.token_type", _LIST, (5, [2, 3, 3] + [1] * 61)),
            ("tokenizer.ggml.bos_token_id", 4, 1),
            ("tokenizer.ggml.unknown_token_id", 4, 0),
            ("tokenizer.ggml.add_bos_token", 7, True),
            ("tokenizer.chat_template", _TEXT, "{{ messages[0]['content'] }}"),
        ]
        if tokenizer == "gpt2":
            keys += [
                ("tokenizer.ggml.pre", _TEXT, "default"),
                ("tokenizer.ggml.merges", _LIST, (_TEXT, ["t h", "h e"])),
            ]
        else:
            keys.append(("tokenizer.ggml.scores", _LIST, (6, [-float(i) for i in range(64)])))
    architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == family)
    names = get_tensor_name_map(architecture, shape["num_hidden_layers"])
    rng, tensors = np.random.default_rng(0), []
    for name, dims in _shapes(shape).items():
        values_of = rng.normal(0, 0.1, dims).astype(np.float32)
        stored = GGMLQuantizationType.F32 if len(dims) == 1 else kind
        data = quantize(values_of, stored).tobytes()
        tensors.append([names.get_name(name, try_suffixes=[".weight"]), list(reversed(dims)), int(stored), None, data])
    return Gguf(keys, tensors)


def _shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        source = open_model(folder, load_format="dummy")
        described: Any = source.describe(source.dtype)
        return dict(described.checkpoint_shapes)


def change_gguf(rng: Random, base: Gguf) -> Gguf:
    """Return a file with one thing in its structure changed."""
    made = Gguf(list(base.keys), [list(tensor) for tensor in base.tensors], base.version, dict(base.counts))
    action, key, tensor = rng.random(), rng.randrange(len(made.keys)), rng.choice(made.tensors)
    name, kind, value = made.keys[key]
    if action < 0.25:
        made.keys[key] = (name, kind, _other_value(rng, kind, value))
    elif action < 0.33:
        kind = rng.choice([*_SCALARS, _TEXT, _LIST, 13, 2**32 - 1])
        new: Any = rng.choice(TEXTS) if kind == _TEXT else rng.choice([*INTEGERS, *FLOATS])
        if kind == _LIST:
            new = (rng.choice([0, 4, 6, _TEXT, _LIST]), [])
        made.keys[key] = (name, kind, new)
    elif action < 0.4:
        del made.keys[key]
    elif action < 0.45:
        made.keys.append((name, kind, _other_value(rng, kind, value)))
    elif action < 0.6:
        dims = list(tensor[1]) or [1]
        place = rng.randrange(len(dims))
        change: Callable[[], Any] = rng.choice(
            [
                lambda: dims.__setitem__(place, rng.choice(INTEGERS)),
                lambda: dims.append(rng.choice([0, 1, 2, 2**62])),
                dims.reverse,
                dims.clear,
                lambda: dims.__setitem__(place, dims[place] * 2),
            ]
        )
        change()
        tensor[1] = dims
    elif action < 0.7:
        tensor[2] = rng.choice([*range(42), 2**31, 2**32 - 1])
        with suppress(ValueError, KeyError):  # data of the right size, so that the format itself is tried
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor[2])]
            wanted = -(-prod(tensor[1]) // block) * size
            tensor[4] = rng.randbytes(wanted) if 0 <= wanted <= _MOST_BYTES else tensor[4]
    elif action < 0.75:
        tensor[3] = rng.choice([*INTEGERS, 1, 31])
    elif action < 0.82:
        tensor[0] = rng.choice(
            [*TEXTS, "rope_freqs.weight", "output.weight", "blk.9.attn_q.weight", rng.choice(made.tensors)[0]]
        )
    elif action < 0.87:
        made.tensors.remove(tensor)
    elif action < 0.92:
        tensor[4] = rng.randbytes(len(tensor[4]))
    else:
        made.counts[rng.choice(["keys", "tensors", "list"])] = rng.choice(INTEGERS)
        made.version = rng.choice([3, 3, 2, 1, 4, 2**32 - 1])
    return made


def _other_value(rng: Random, kind: int, value: Any) -> Any:
    if kind == _TEXT:
        return rng.choice(
            [*TEXTS, "llama", "qwen2", "gemma", "bert", "gpt2", "llama", "t5", "rwkv", "yarn", value[:-1]]
        )
    if kind == _LIST:
        element, items = value
        items = list(items)
        if not items:
            return element, items
        place = rng.randrange(len(items))
        items[place] = _other_value(rng, element, items[place])
        return element, rng.choice([items, items[:place], items * 2, [items[place]] * len(items)])
    return rng.choice([*INTEGERS, *FLOATS])


# Safetensors


def safetensors_bases() -> list[tuple[dict[str, Any], bytes]]:
    """Return (configuration, file) of some families."""
    rng = np.random.default_rng(0)
    made = []
    for family, dtype in (("llama", np.float32), ("qwen3", np.float16), ("mixtral", np.float32)):
        weights = {name: rng.normal(0, 0.1, dims).astype(dtype) for name, dims in _shapes(config(family)).items()}
        made.append((config(family), save(weights)))
    return made


def change_safetensors(rng: Random, data: bytes) -> bytes:
    """Return a file with another header, or other bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.25:
        return damaged(rng, data)
    head = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(head))
        entry = head[name]
        action = rng.random()
        if action < 0.5:
            head[name] = changed(rng, entry)
        elif action < 0.65 and isinstance(entry, dict):
            head[name] = entry | {
                "dtype": rng.choice(["F64", "BF16", "F8_E4M3", "I64", "BOOL", "U8", "X", "F4", "C64"])
            }
        elif action < 0.8 and isinstance(entry, dict):
            size = rng.choice([0, 1, 2**31, 2**62])
            head[name] = entry | {"shape": rng.choice([[], [0], [size], [size, size], [1, *entry.get("shape", [])]])}
        elif action < 0.9:
            head[rng.choice([*TEXTS, name + "x", "__metadata__"])] = head.pop(name)
        else:
            head["__metadata__"] = rng.choice([*NESTED, *SCALARS])
    written = json.dumps(head).encode()
    size = rng.choice(INTEGERS) % 2**64 if rng.random() < 0.1 else len(written)
    return struct.pack("<Q", size) + written + data[8 + length :]


def prepare(own: Path) -> Any:
    """Return the case of a seed: of three, two are GGUF files."""
    ggufs, folders = gguf_bases(), safetensors_bases()

    def case(seed: int, folder: Path) -> None:
        rng = Random(seed)
        if seed % 3:
            made = rng.choice(ggufs)
            for _ in range(rng.choice([1, 1, 2, 3])):
                made = change_gguf(rng, made)
            data = made.write(rng)
            if rng.random() < 0.15:
                place = rng.randrange(4000)
                data = damaged(rng, data[:place]) + data[place:] if rng.random() < 0.7 else damaged(rng, data)
            file = folder / "model.gguf"
            file.write_bytes(data)
            if rng.random() < 0.01:
                misplaced(rng, [file])
            use(rng.choice([file, folder]), has_tokenizer=True)
            return
        values, data = rng.choice(folders)
        (folder / "config.json").write_text(json.dumps(values))
        files = [folder / "config.json", folder / "model.safetensors"]
        files[1].write_bytes(change_safetensors(rng, data))
        if rng.random() < 0.2:
            names = list(json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]))
            index: Any = {
                "metadata": {},
                "weight_map": dict.fromkeys(names, rng.choice(["model.safetensors", "x", "../x", "."])),
            }
            files.append(folder / "model.safetensors.index.json")
            write_json(rng, files[-1], changed(rng, index))
        if rng.random() < 0.05:
            misplaced(rng, files)
        use(folder, has_tokenizer=False)

    return case
