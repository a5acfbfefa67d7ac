"""Models whose weights stay in the blocks of their GGUF file: equal tokens however they run, and the life of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import CapabilityRefused, CorruptWeights, ModelError
from hardpoint.weights.gguf_file import read_gguf

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * p) % 250 for i in range(5 + 9 * p)]} for p in range(4)]
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 128, 256, 4, 2, 256, 2


K_SCALES: dict[str, dict[int, float]] = {
    "Q3_K": {108: 2e-3},
    "Q4_K": {0: 6e-4, 2: 4.5e-3},
    "Q5_K": {0: 3e-4, 2: 4.5e-3},
    "Q6_K": {208: 1e-4},
}
"""Where blocks of 256 have what their scales and minima are multiplied by, and values for it that give ordinary weights."""


def k_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return a matrix in blocks of one of ggml's K formats, which the `gguf` library does not write: random numbers and scales."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at, value in K_SCALES[kind.name].items():
        raw[..., at : at + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_model(path: Path, *, kinds: dict[str, str] | None = None, seed: int = 0) -> Path:
    """Write a seeded llama: matrices in Q4_1, the embedding in Q8_0, and those of `kinds` otherwise, by a part of their names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0.0, 0.15, shape).astype(np.float32) + (1.0 if len(shape) == 1 else 0.0)
        kind = "F32" if len(shape) == 1 else "Q8_0" if name.startswith("token") else "Q4_1"
        kind = next((to for part, to in (kinds or {}).items() if part in name), kind)
        stored = gguf.GGMLQuantizationType[kind]
        raw = k_blocks(stored, values.shape, rng) if kind in K_SCALES else gguf.quantize(values, stored)
        writer.add_tensor(name + ".weight", raw, raw_dtype=stored)

    add("token_embd", VOCAB, HIDDEN)
    for i in range(LAYERS):
        kv = HIDDEN // HEADS * KV_HEADS
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            add(f"blk.{i}.{name}", *shape)
    add("output_norm", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("blocks") / "model.gguf")


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def engine(path: Path, **settings: Any) -> LLM:
        # float32, so that engines that round otherwise differ little.
        arguments = {
            "quantization": "gguf",
            "dtype": "float32",
            "num_device_blocks": 64,
            "threads": 2,
            "skip_tokenizer_init": True,
        }
        made.append(LLM(str(path), **arguments | settings))
        return made[-1]

    yield engine
    for llm in made:
        llm.shutdown()


def run(llm: LLM, prompts: list[dict[str, list[int]]] = PROMPTS) -> list[tuple[list[int], list[float]]]:
    """Return each prompt's tokens and their log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    done = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [
        (list(one.token_ids), [entry[t].logprob for entry, t in zip(one.logprobs or (), one.token_ids, strict=True)])
        for one in done
    ]


def test_a_prompt_has_the_same_bits_alone_in_a_batch_and_in_chunks(file: Path, start: Callable[..., LLM]) -> None:
    llm = start(file, enable_prefix_caching=False)
    assert llm.info.path == "fused"
    together = run(llm)
    assert together == [run(llm, [prompt])[0] for prompt in PROMPTS]
    assert together == run(start(file, enable_prefix_caching=False, max_num_batched_tokens=9, max_num_seqs=4))


def test_weights_take_their_blocks_bytes_and_expanded_ones_give_nearly_the_same(
    file: Path, start: Callable[..., LLM]
) -> None:
    blocks, plain = start(file), start(file, quantization="none")
    stored = sum(tensor.nbytes for tensor in read_gguf(file).tensors.values())
    assert blocks.info.weight_bytes == pytest.approx(stored, rel=0.02)
    assert plain.info.weight_bytes > 2.5 * stored
    for (_, ours), (_, theirs) in zip(run(blocks), run(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


def test_log_probabilities_of_prompts_are_those_of_the_logits(file: Path, start: Callable[..., LLM]) -> None:
    """One alternative a token comes without the logits in memory, two come from them."""
    llm, prompt = start(file, enable_prefix_caching=False), PROMPTS[0]
    one, two = (
        llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=count))[0].prompt_logprobs
        for count in (1, 2)
    )
    assert one is not None
    assert two is not None
    for token, found, expected in list(zip(prompt["prompt_token_ids"], one, two, strict=True))[1:]:
        assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
        assert found[token].rank == expected[token].rank


@pytest.mark.parametrize(
    "settings",
    [{"use_fused_decoder": False}, {"tensor_parallel_size": 2, "executor": "multi_process"}],
    ids=["layers", "two-ranks"],
)
def test_layers_and_ranks_compute_what_the_program_does(
    settings: dict[str, Any], file: Path, start: Callable[..., LLM]
) -> None:
    other = start(file, **settings)
    assert other.info.path == "modules"
    for (_, ours), (_, theirs) in zip(run(start(file)), run(other), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
def test_blocks_sleep_are_reloaded_and_written(
    fused: bool, file: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes())
    llm = start(path, use_fused_decoder=fused, enable_sleep_mode=True, sleep_disk_directory=str(tmp_path))
    expected = run(llm)
    for arguments in ({"tier": "source"}, {"tier": "disk"}, {"tier": "host"}, {"level": 2}):
        llm.sleep(**arguments)
        if not llm.wake_up().weights_valid:
            llm.reload_weights()
        assert run(llm) == expected, arguments
    other = write_model(tmp_path / "other.gguf", seed=1)
    changed = run(start(other, use_fused_decoder=fused))
    assert changed != expected
    path.write_bytes(other.read_bytes())
    llm.reload_weights()
    assert run(llm) == changed
    # Floating values are rounded to blocks.
    name = "model.layers.0.mlp.down_proj.weight"
    stored = read_gguf(file).tensors["blk.0.ffn_down.weight"]
    _, values = next(read_gguf(file).rows(stored.name))
    llm.update_weights([(name, values)])
    once = run(llm)
    assert once != changed
    llm.update_weights([(name, values.to(torch.float64))])
    assert run(llm) == once


def test_merged_tensors_of_unlike_formats_are_expanded_and_the_others_stay(
    tmp_path: Path, start: Callable[..., LLM]
) -> None:
    mixed = write_model(
        tmp_path / "mixed.gguf", kinds={"attn_v": "Q8_0", "ffn_down": "Q5_0", "ffn_up": "Q5_1", "ffn_gate": "Q5_1"}
    )
    llm, plain = start(mixed), start(mixed, quantization="none")
    assert llm.info.weight_bytes < plain.info.weight_bytes / 1.5
    for (_, ours), (_, theirs) in zip(run(llm), run(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_formats_are_multiplied_as_stored_and_expanded_where_ranks_cut_their_blocks(
    kind: str, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    path = write_model(tmp_path / "model.gguf", kinds={"ffn_down": kind}, seed=1)
    llm, plain = start(path), start(path, quantization="none")
    assert llm.info.weight_formats == {"Q4_1": 3 * LAYERS, kind: LAYERS, "Q8_0": 1}
    expected = run(plain)
    for (_, ours), (_, theirs) in zip(run(llm), expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)
    with pytest.raises(ModelError, match=f"cannot be written into weights in blocks of {kind}"):
        llm.update_weights([("model.layers.1.mlp.down_proj.weight", torch.ones(128, 256))])
    if kind == "Q6_K":
        halves = start(path, tensor_parallel_size=2, executor="multi_process")
        assert halves.info.weight_formats == {"Q4_1": 6 * LAYERS, "float32": 2 * LAYERS, "Q8_0": 2}
        for (_, ours), (_, theirs) in zip(run(halves), expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=0.1)


def test_what_cannot_be_is_refused_by_name_and_auto_expands_it(tmp_path: Path, start: Callable[..., LLM]) -> None:
    other = write_model(tmp_path / "other.gguf", kinds={"ffn_down": "Q3_K"})
    with pytest.raises(CapabilityRefused, match=r"Q3_K \(it does by: .*Q4_0, Q4_1, .*Q8_0\)"):
        start(other)
    assert start(other, quantization="auto").info.weight_bytes < start(other, quantization="none").info.weight_bytes
    plain = write_model(tmp_path / "plain.gguf", kinds={"attn": "F16", "ffn": "F16", "token": "F16"})
    with pytest.raises(CapabilityRefused, match="no weights in blocks"):
        start(plain)


def test_scales_that_are_not_finite_are_corrupt(file: Path, tmp_path: Path, start: Callable[..., LLM]) -> None:
    data = bytearray(file.read_bytes())
    tensor = read_gguf(file).tensors["blk.1.ffn_up.weight"]
    data[tensor.offset + 20 * 7 + 1] = 0x7E
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(CorruptWeights, match="not finite"):
        start(path)
