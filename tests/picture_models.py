"""Tiny seeded models that take pictures, with processors, as their publishers' folders have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

_SPECIAL = ["<unk>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def picture(seed: int, width: int = 30, height: int = 20) -> Image.Image:
    """Return a picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def save_picture_model(folder: Path, kind: str = "idefics3", seed: int = 0) -> Any:
    """Write a tiny float32 model ("idefics3", "smolvlm" or "qwen2_5_vl") and return transformers' own, with eager attention.

    A tile of the first two has 16 x 16 pixels, which become 4 embeddings; of the third a square of 8 x 8 pixels becomes one.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    write = _write_qwen if kind == "qwen2_5_vl" else _write_idefics
    config = AutoConfig.for_model(kind, **write(folder, kind), pad_token_id=0, tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


def _write_idefics(folder: Path, kind: str) -> dict[str, Any]:
    """Write tokenizer and processor; return the configuration's values."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    special = [*_SPECIAL, *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))]
    vocabulary = _write_tokenizer(folder, special, "<image>")
    processor = Idefics3ImageProcessorPil if kind == "idefics3" else SmolVLMImageProcessorPil
    processor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}).save_pretrained(folder)
    return {
        "text_config": _TEXT | {"model_type": "llama", "vocab_size": len(vocabulary)},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "scale_factor": 2,
        "image_token_id": vocabulary["<image>"],
    }


def _write_qwen(folder: Path, kind: str) -> dict[str, Any]:
    """Write tokenizer and processor; return the configuration's values."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pads = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    vocabulary = _write_tokenizer(folder, [*_SPECIAL[:3], *pads], "<|vision_start|><|image_pad|><|vision_end|>")
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=2048).save_pretrained(folder)
    return {
        "text_config": _TEXT
        | {
            "vocab_size": len(vocabulary),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
    }


def _write_tokenizer(folder: Path, special: list[str], placeholder: str) -> dict[str, int]:
    """Write a tokenizer of letters, with a chat template, and return its vocabulary."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*special, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<unk>",
        additional_special_tokens=special[3:],
    )
    fast.chat_template = _TEMPLATE.replace("<image>", placeholder)
    fast.save_pretrained(folder)
    return vocabulary
