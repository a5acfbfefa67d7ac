"""Pictures as a model takes them: read, and made into tokens and arrays by the model's own processor, which is transformers'."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hardpoint.interfaces.batch import AnyArray, EmbeddingKind, EmbeddingSource, Int64Array
from hardpoint.interfaces.errors import ConfigError, InvalidRequest, ModelError
from hardpoint.validation import shown

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of pictures that are read from bytes. Others are not tried: a decoder is only as safe as it is used."""


Spans = tuple[tuple[int, int], ...]
"""(start, end) of the tokens whose embeddings are a picture's."""


def read_picture(data: bytes) -> Image:
    """Return the picture that an image file's bytes hold, its first frame; raises InvalidRequest for what is none, or is too large.

    It stands upright: a camera writes how it was held (EXIF) beside pixels that it does not turn.
    """
    pillow = _pillow()
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow's bound on the number of pixels: what has more is a bomb at twice the bound, and a warning before.
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            picture: Image = pillow.open(BytesIO(data), formats=FORMATS)
            picture.load()
            with suppress(Exception):  # a damaged note beside the pixels takes nothing from them
                ImageOps.exif_transpose(picture, in_place=True)
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
        raise InvalidRequest(
            "a picture is too large", found=str(error), hint=f"Give at most {pillow.MAX_IMAGE_PIXELS} pixels"
        ) from error
    except (
        Exception
    ) as error:  # whatever a decoder raises for a damaged file: OSError, SyntaxError, ValueError, struct.error, ...
        raise InvalidRequest(
            "a picture cannot be read",
            found=f"{len(data)} bytes: {error}",
            hint=f"Give a whole file of the format {', '.join(FORMATS)}",
        ) from error
    return picture


def as_picture(given: object) -> Image:
    """Return a picture as red, green and blue; raises InvalidRequest for what is none.

    What is transparent is on white, as transformers and vLLM have it: the colours of transparent pixels are often black.

    Args:
        given: Pillow's picture, or uint8[height, width, 3] of numpy.
    """
    pillow = _pillow()
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3 or not given.size:
            raise InvalidRequest(
                "a picture as an array is uint8[height, width, 3]", found=f"{given.dtype}{list(given.shape)}"
            )
        picture: Image = pillow.fromarray(given)
        return picture
    if not isinstance(given, pillow.Image):
        raise InvalidRequest(
            "a picture must be Pillow's Image or a numpy array uint8[height, width, 3]", found=shown(given)
        )
    if given.width * given.height > pillow.MAX_IMAGE_PIXELS or min(given.size) < 1:
        raise InvalidRequest(
            "a picture has no pixels or too many",
            found=f"{given.width} x {given.height}",
            hint=f"Give 1 to {pillow.MAX_IMAGE_PIXELS} pixels",
        )
    try:
        seen: Image = given
        if "A" in given.getbands() or "transparency" in given.info:
            clear = given.convert("RGBA")
            seen = pillow.alpha_composite(pillow.new("RGBA", clear.size, "white"), clear)
        return seen.convert("RGB")
    except Exception as error:  # as in `read_picture`: a file is read when its pixels are
        raise InvalidRequest("a picture cannot be read", found=str(error)) from error


class PictureProcessor(ABC):
    """Makes tokens and arrays of texts with pictures, by the model's own processor.

    Attributes:
        placeholder: what stands for a picture in a text.
    """

    placeholder: ClassVar[str]

    def __call__(
        self, text: str, pictures: Sequence[Image], *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[EmbeddingSource, Spans]], Int64Array | None]:
        """Return a text's token ids, each placeholder of which became its picture's tokens, and the pictures, each with its tokens.

        Beside them the tokens' positions by time, row and column, int64[3, tokens], where the model has such; else None. Raises
        InvalidRequest for pictures that do not fit the text.
        """
        count = text.count(self.placeholder)
        if count != len(pictures):
            raise InvalidRequest(
                f"the prompt has {count} {self.placeholder} for {len(pictures)} pictures",
                hint=f"Write {self.placeholder} once where each picture belongs",
            )
        try:
            ids, sources = self._process(text, pictures, add_special_tokens)
        except Exception as error:  # a picture of 1 x 10000 pixels, for example, has no size that its tiles could have
            raise InvalidRequest(
                "the model's processor cannot take these pictures", found=f"{type(error).__name__}: {error}"
            ) from error
        places = np.flatnonzero(ids == self.token)
        rows = [source.num_rows for source in sources]
        if len(places) != sum(rows):
            raise InvalidRequest(
                "the text's tokens and the pictures do not fit together",
                found=f"{len(places)} tokens of pictures for {sum(rows)} embeddings",
            )
        own = np.split(places, np.cumsum(rows)[:-1])
        inputs = [(source, tuple(_runs(some))) for source, some in zip(sources, own, strict=True)]
        return ids.tolist(), inputs, self.positions(len(ids), inputs)

    @property
    @abstractmethod
    def token(self) -> int:
        """The id of the tokens that pictures become."""

    @abstractmethod
    def _process(
        self, text: str, pictures: Sequence[Image], add_special_tokens: bool
    ) -> tuple[Int64Array, list[EmbeddingSource]]:
        """Return the token ids, int64[tokens], and the arrays of each picture; raises whatever the processor does."""

    def positions(self, length: int, pictures: Sequence[tuple[EmbeddingSource, Spans]]) -> Int64Array | None:
        """Return the positions of a prompt's tokens by time, row and column; None where a token's position is its number."""
        return None


class Idefics3Pictures(PictureProcessor):
    """Of Idefics3 and SmolVLM: a picture is divided into tiles, and comes as a whole after them.

    Args:
        folder: of the model.
        tokenizer: the engine's own, which gets further special tokens.
    """

    placeholder = "<image>"

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import Idefics3Processor

        self._processor = Idefics3Processor(_images(folder), tokenizer, image_seq_len=_rows_of_a_tile(folder))
        self._rows = int(self._processor.image_seq_len)

    @property
    def token(self) -> int:
        return int(self._processor.image_token_id)

    def _process(
        self, text: str, pictures: Sequence[Image], add_special_tokens: bool
    ) -> tuple[Int64Array, list[EmbeddingSource]]:
        made = self._processor(
            text=text, images=[list(pictures)], add_special_tokens=add_special_tokens, return_tensors="np"
        )
        pixels, mask = made["pixel_values"][0], made["pixel_attention_mask"][0]
        images, sources, tile = self._processor.image_processor, list[EmbeddingSource](), 0
        for picture in pictures:
            tiles, *_ = images.get_number_of_image_patches(picture.height, picture.width, {})
            count = tiles or 1  # transformers says 0 of a picture that is not divided, and makes one tile of it
            some = slice(tile, tile + count)
            arrays = {
                "pixel_values": np.ascontiguousarray(pixels[some], np.float32),
                "pixel_attention_mask": np.ascontiguousarray(mask[some], np.bool_),
            }
            sources.append(EmbeddingSource(EmbeddingKind.IMAGE, count * self._rows, arrays))
            tile += count
        if tile != len(pixels):
            raise ValueError(f"{len(pixels)} tiles, where {tile} were to be")
        return np.asarray(made["input_ids"][0], np.int64), sources


class Qwen2_5_VLPictures(PictureProcessor):  # noqa: N801
    """Of Qwen2.5-VL: a picture is divided into patches, of which squares become one embedding each.

    Args:
        folder: of the model.
        tokenizer: the engine's own.
    """

    placeholder = "<|image_pad|>"

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._images, self._tokenizer = _images(folder), tokenizer
        self._merge = int(self._images.merge_size)
        self._token = int(tokenizer.convert_tokens_to_ids(self.placeholder))

    @property
    def token(self) -> int:
        return self._token

    def _process(
        self, text: str, pictures: Sequence[Image], add_special_tokens: bool
    ) -> tuple[Int64Array, list[EmbeddingSource]]:
        first, *rest = text.split(self.placeholder)
        sources, parts = list[EmbeddingSource](), [first]
        for picture, after in zip(pictures, rest, strict=True):
            made = self._images(images=[picture], return_tensors="np")
            grid = np.asarray(made["image_grid_thw"][0], np.int64)
            pixels: AnyArray = np.ascontiguousarray(made["pixel_values"], np.float32)
            arrays: dict[str, AnyArray] = {"pixel_values": pixels, "image_grid_thw": grid}
            rows = int(grid.prod()) // self._merge**2
            sources.append(EmbeddingSource(EmbeddingKind.IMAGE, rows, arrays))
            parts += [self.placeholder * rows, after]
        ids = self._tokenizer.encode("".join(parts), add_special_tokens=add_special_tokens)
        return np.asarray(ids, np.int64), sources

    def positions(self, length: int, pictures: Sequence[tuple[EmbeddingSource, Spans]]) -> Int64Array | None:
        found = np.empty((3, length), np.int64)
        at = following = 0
        for source, ((start, end),) in pictures:
            found[:, at:start] = np.arange(start - at) + following
            following += start - at
            _, height, width = (int(size) // self._merge for size in source.arrays["image_grid_thw"])
            found[0, start:end] = following
            found[1, start:end] = following + np.arange(height).repeat(width)
            found[2, start:end] = following + np.tile(np.arange(width), height)
            following += max(height, width)
            at = end
        found[:, at:] = np.arange(length - at) + following
        return found


_PROCESSORS: dict[str, type[Idefics3Pictures] | type[Qwen2_5_VLPictures]] = {
    "Idefics3ForConditionalGeneration": Idefics3Pictures,
    "SmolVLMForConditionalGeneration": Idefics3Pictures,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLPictures,
}


def picture_processor(architecture: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> PictureProcessor:
    """Return the processor of a model that takes pictures; raises ModelError, and ConfigError where Pillow is not installed."""
    _pillow()
    try:
        return _PROCESSORS[architecture](folder, tokenizer)
    except Exception as error:  # transformers raises what its parts raise
        raise ModelError(
            f"{folder} has no usable processor of pictures",
            found=f"{type(error).__name__}: {error}",
            hint="Its preprocessor_config.json belongs to the model",
        ) from error


def _images(folder: Path) -> Any:
    """Return transformers' processor of pictures over Pillow: what it makes does not depend on whether torchvision is installed."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)


def _runs(places: AnyArray) -> Iterator[tuple[int, int]]:
    """Return (start, end) of each run of neighbouring numbers, in order."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    for run in np.split(places, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _rows_of_a_tile(folder: Path) -> int:
    """Return how many embeddings the model makes of a tile."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vision = config.get("vision_config", {})
    side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 32))
    return int((side // int(config.get("scale_factor", 2))) ** 2)


def _pillow() -> Any:
    """Return Pillow's module of pictures; raises ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "the package that reads pictures is not installed",
            found=str(error),
            hint="Install the extra: hardpoint[vision]",
        ) from error
    return Image
