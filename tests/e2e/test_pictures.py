"""Pictures in prompts, end to end on the CPU backend: tiny random models with transformers as the oracle."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import ConfigError, InvalidRequest, UnsupportedArchitecture
from hardpoint.models import as_picture, open_model, read_picture
from tests.picture_models import picture, save_picture_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEXT = "What is in <image> here?"
ROUNDING = 1e-3
Make = Callable[..., Any]


def prompt(*pictures: Any, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def tokens(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(list(prompts), params, use_tqdm=False)]


class Oracle:
    """transformers' model and its whole processor."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.model, self._kind = folder, save_picture_model(folder, kind), kind
        self.placeholder = "<|image_pad|>" if kind == "qwen2_5_vl" else "<image>"
        self.read_processor()

    def read_processor(self) -> None:
        """Read the processor from the folder."""
        from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

        images, tokenizer = (
            AutoImageProcessor.from_pretrained(self.folder, backend="pil"),
            AutoTokenizer.from_pretrained(self.folder),
        )
        self._images, self._tokenizer = images, tokenizer
        # The whole processor of the third needs one of films, and that one torchvision.
        self._processor = None if self._kind == "qwen2_5_vl" else Idefics3Processor(images, tokenizer, image_seq_len=4)

    def inputs(self, text: str, pictures: list[Any]) -> Any:
        """Return what the model is given for a prompt."""
        if self._processor is not None:
            return self._processor(text=text, images=[pictures], return_tensors="pt")
        made = self._images(images=pictures, return_tensors="pt")
        for moments, height, width in made["image_grid_thw"].tolist():
            text = text.replace(self.placeholder, "\0" * (moments * height * width // 4), 1)
        ids = self._tokenizer(text.replace("\0", self.placeholder), return_tensors="pt")["input_ids"]
        types = (ids == self._tokenizer.convert_tokens_to_ids(self.placeholder)).int()
        return {**made, "input_ids": ids, "mm_token_type_ids": types}

    def prompt(self, *pictures: Any, text: str = TEXT) -> dict[str, Any]:
        return prompt(*pictures, text=text.replace("<image>", self.placeholder))

    def check(self, given: dict[str, Any], prompt_ids: list[int], chosen: list[int]) -> None:
        """Greedy tokens by the logit-margin rule: the oracle prefers no other token by more than the rounding of its logits."""
        inputs = dict(self.inputs(given["prompt"], given["multi_modal_data"]["image"]))
        assert inputs.pop("input_ids")[0].tolist() == prompt_ids
        inputs.pop("attention_mask", None)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(chosen)))
        with torch.no_grad():
            ids = torch.tensor([[*prompt_ids, *chosen]])
            logits = self.model(input_ids=ids, **inputs).logits[0, len(prompt_ids) - 1 : -1]
        margin = logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
        assert float(margin.max()) <= ROUNDING


@pytest.fixture(scope="module", params=["idefics3", "smolvlm", "qwen2_5_vl"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    save_picture_model(found)
    return found


@pytest.fixture(scope="module")
def make(make_engine: Make, folder: Path) -> Make:
    def made(**settings: Any) -> Any:
        return make_engine(str(folder), **{"max_model_len": 256, "block_size": 16, **settings})

    return made


@pytest.fixture(scope="module")
def llm(make: Make) -> Iterator[LLM]:
    with make() as made:
        yield made


def test_tokens_equal_transformers_alone_in_a_batch_and_in_chunks(make_engine: Make, oracle: Oracle) -> None:
    given = [
        oracle.prompt(picture(1)),
        oracle.prompt(picture(2, 8, 8), picture(3, 40, 17), text="<image> or <image>, which one?"),
        oracle.prompt(picture(4, 12, 50), text="<image>"),
    ]
    settings = {"max_model_len": 256, "block_size": 16}
    with make_engine(str(oracle.folder), **settings) as llm:
        assert llm.info.path == "modules"
        alone = [llm.generate(one, GREEDY, use_tqdm=False)[0] for one in given]
        for one, output in zip(given, alone, strict=True):
            oracle.check(one, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        llm.reset_prefix_cache()
        together = tokens(llm, given[0], "Text alone.", given[1], "More text", given[2])
        assert [together[0], together[2], together[4]] == [list(one.outputs[0].token_ids) for one in alone]
    # The prompt's chunks end at, before and behind every border of a picture's tokens.
    for chunk in (1, 3, 7):
        with make_engine(str(oracle.folder), max_num_batched_tokens=chunk, max_num_seqs=1, **settings) as llm:
            assert tokens(llm, *given) == [list(one.outputs[0].token_ids) for one in alone]


@pytest.mark.parametrize("changes", [{"do_image_splitting": False}, {"size": {"longest_edge": 16}}])
def test_pictures_that_are_not_divided_into_tiles(make_engine: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = Oracle(tmp_path, "smolvlm")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    oracle.read_processor()
    given = oracle.prompt(picture(1), picture(2, 40, 17), text="<image> or <image>?")
    with make_engine(str(tmp_path), max_model_len=256) as llm:
        (output,) = llm.generate(given, GREEDY, use_tqdm=False)
        oracle.check(given, list(output.prompt_token_ids), list(output.outputs[0].token_ids))


def test_a_prefix_is_found_only_with_the_same_picture(llm: LLM) -> None:
    llm.reset_prefix_cache()

    def served(one: Any) -> tuple[int, list[int]]:
        (output,) = llm.generate(one, GREEDY, use_tqdm=False)
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    first, again, other = served(prompt(picture(1))), served(prompt(picture(1))), served(prompt(picture(2)))
    assert first[0] == 0
    assert again[0] > 32
    assert again[1] == first[1]
    assert other[0] == 0, "the first block has tokens of the picture"
    assert other[1] != first[1]


def test_a_name_stands_for_a_pictures_content(llm: LLM) -> None:
    llm.reset_prefix_cache()
    named = [{**prompt(picture(seed)), "multi_modal_uuids": {"image": ["cat"]}} for seed in (5, 6)]
    cached = [llm.generate(one, GREEDY, use_tqdm=False)[0].num_cached_tokens for one in named]
    assert cached[0] == 0
    assert cached[1] > 32


def test_completions_of_a_prompt_and_beams_share_its_pictures(llm: LLM) -> None:
    llm.reset_prefix_cache()
    alone = tokens(llm, prompt(picture(1)))[0]
    (output,) = llm.generate(prompt(picture(1)), SamplingParams(n=3, temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [list(one.token_ids) for one in output.outputs] == [alone] * 3


def test_preempted_prompts_with_pictures_are_computed_again(llm: LLM, make: Make) -> None:
    given = [prompt(picture(seed)) for seed in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = tokens(llm, *given, params=params)
    # Nothing is kept beyond what one step needs, and not all six fit at once.
    with make(num_device_blocks=20, swap_space=0, encoder_cache_space=0) as small:
        assert tokens(small, *given, params=params) == expected
        assert small.engine.stats().preemptions > 0


@pytest.mark.parametrize(
    ("kind", "ranks"), [("idefics3", {"tensor_parallel_size": 2}), ("qwen2_5_vl", {"pipeline_parallel_size": 2})]
)
def test_pictures_reach_an_engine_and_ranks_in_other_processes(
    make_engine: Make, tmp_path: Path, kind: str, ranks: dict[str, int]
) -> None:
    save_picture_model(tmp_path, kind)
    mark = "<|image_pad|>" if kind == "qwen2_5_vl" else "<image>"
    given = [prompt(picture(1), text=f"{mark}?"), "Text alone.", prompt(picture(2), picture(3), text=mark * 2)]
    settings = {"max_model_len": 256, "block_size": 16}
    with make_engine(str(tmp_path), **settings) as llm:
        expected = tokens(llm, *given)
    with make_engine(str(tmp_path), engine_process=True, **ranks, **settings) as other:
        assert tokens(other, *given) == expected


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl"])
def test_drafted_tokens_after_a_picture_are_those_of_single_steps(make_engine: Make, tmp_path: Path, kind: str) -> None:
    """Also where a token's position is not its number, since a picture's tokens share their places in time."""
    save_picture_model(tmp_path, kind)
    mark = "<|image_pad|>" if kind == "qwen2_5_vl" else "<image>"
    given = [prompt(picture(seed), text=f"the moon {mark} the moon the moon") for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    settings = {"max_model_len": 256, "block_size": 16}
    with make_engine(str(tmp_path), **settings) as llm:
        expected = tokens(llm, *given, params=params)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    with make_engine(str(tmp_path), speculative_config=drafts, **settings) as llm:
        assert tokens(llm, *given, params=params) == expected
        assert llm.engine.stats().draft_tokens > 0


def test_pictures_after_a_sleep_with_preserved_and_with_lost_weights(llm: LLM, make: Make, folder: Path) -> None:
    given = [prompt(picture(1)), prompt(picture(2))]
    expected = tokens(llm, *given)
    with make(enable_sleep_mode=True) as sleeping:
        for level in (1, 2):
            assert tokens(sleeping, *given) == expected
            sleeping.sleep(level)
            sleeping.wake_up()
            if level == 2:
                sleeping.reload_weights()
            assert tokens(sleeping, *given) == expected


def test_a_request_with_a_picture_goes_on_after_a_sleep(llm: LLM, make: Make) -> None:
    expected = tokens(llm, prompt(picture(1)))[0]
    with make(
        enable_sleep_mode=True, max_num_batched_tokens=20, max_num_seqs=4, enable_prefix_caching=False
    ) as sleeping:
        engine = sleeping.engine
        engine.add_request("one", prompt(picture(1)), GREEDY)
        engine.step()
        engine.step()
        sleeping.sleep(1, mode="keep")
        sleeping.wake_up()
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        assert list(outputs[-1].outputs[0].token_ids) == expected


def test_new_weights_encode_pictures_anew(make: Make, make_engine: Make, tmp_path: Path) -> None:
    other = save_picture_model(tmp_path, seed=1)
    with make_engine(str(tmp_path), max_model_len=256, block_size=16) as llm:
        expected = tokens(llm, prompt(picture(1)))
    with make() as llm:
        assert tokens(llm, prompt(picture(1))) != expected
        llm.update_weights([(name, tensor.clone()) for name, tensor in other.state_dict().items()])
        assert tokens(llm, prompt(picture(1))) == expected


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this? "}, *parts]}]


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_chat_takes_pictures_as_data_as_objects_and_from_the_allowed_folder(
    llm: LLM, make: Make, tmp_path: Path
) -> None:
    image = picture(7)
    url, pillow = url_part(data_url(encoded(image))), {"type": "image_pil", "image_pil": image}
    answers = [llm.chat(said(part), GREEDY, use_tqdm=False)[0] for part in (url, pillow)]
    assert answers[0].prompt.count("<image>") == 1
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    allowed.mkdir()
    for file in (allowed / "a.png", outside):
        file.write_bytes(encoded(image))
    (allowed / "link.png").symlink_to(outside)
    with make(allowed_local_media_path=str(allowed)) as local:
        answer = local.chat(said(url_part(f"file://{allowed}/a.png")), GREEDY, use_tqdm=False)[0]
        assert answer.outputs[0].token_ids == answers[0].outputs[0].token_ids
        for path in (outside, allowed / "link.png", allowed / ".." / "outside.png", allowed, allowed / "none.png"):
            with pytest.raises(InvalidRequest, match="below allowed_local_media_path"):
                local.chat(said(url_part(f"file://{path}")), GREEDY)


def test_what_is_transparent_is_on_white_and_photographs_stand_upright(tmp_path: Path) -> None:
    from transformers.image_transforms import convert_to_rgb
    from transformers.image_utils import load_image

    clear = picture(1).convert("RGBA")
    clear.putalpha(picture(2).convert("L"))
    palette = picture(1).quantize(16)
    palette.info["transparency"] = 3
    for given in (clear, clear.convert("LA"), palette, picture(1), picture(1).convert("L"), Image.new("RGBA", (4, 4))):
        for one in (given, read_picture(encoded(given))):
            assert np.array_equal(as_picture(one), convert_to_rgb(one, return_numpy=True)), given.mode
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        picture(1).save(tmp_path / "photo.jpg", exif=exif)
        found = as_picture(read_picture((tmp_path / "photo.jpg").read_bytes()))
        assert np.array_equal(found, load_image(str(tmp_path / "photo.jpg"))), orientation


BAD_PARTS = {
    "a URL of the network": (url_part("http://169.254.169.254/latest"), "not fetched over the network"),
    "a local file": (url_part("file:///etc/hostname"), "local pictures are not read"),
    "half a file": (url_part(data_url(encoded(picture(1))[:200])), "cannot be read"),
    "no picture": (url_part(data_url(b"<svg/>")), "cannot be read"),
    "bad base64": (url_part("data:image/png;base64,###"), "data: URL"),
    "no data": (url_part("data:image/png"), "data: URL"),
    "a bomb": (url_part(data_url(encoded(Image.new("1", (20000, 10000))))), "too large"),
    "a film": ({"type": "video_url", "video_url": {"url": "data:,"}}, "parts of this type"),
    "a sound": ({"type": "input_audio", "input_audio": {}}, "parts of this type"),
    "no URL": ({"type": "image_url"}, "has a 'url'"),
    "a number": ({"type": "image_pil", "image_pil": 3}, "must be Pillow's Image"),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_what_is_no_picture_is_refused_in_chat(llm: LLM, name: str) -> None:
    part, message = BAD_PARTS[name]
    with pytest.raises(InvalidRequest, match=message):
        llm.chat(said(part), GREEDY)


BAD_PROMPTS = {
    "fewer placeholders": (prompt(picture(1), text="none"), "0 <image> for 1 pictures"),
    "more placeholders": (prompt(picture(1), text="<image><image>"), "2 <image> for 1 pictures"),
    "NaN": (prompt(np.full((8, 8, 3), np.nan)), "uint8"),
    "embeddings": (prompt(torch.zeros(1, 4, 64)), "must be Pillow's Image"),
    "no pixels": (prompt(np.zeros((0, 8, 3), np.uint8)), "uint8"),
    "a bomb": (prompt(Image.new("1", (20000, 10000))), "no pixels or too many"),
    "a prompt that is too long": (prompt(*[picture(1)] * 2, text="<image>" * 2 + "x" * 240), "tokens"),
    "a film": ({"prompt": "x", "multi_modal_data": {"video": np.zeros((2, 8, 8, 3))}}, "only pictures"),
    "a sound": ({"prompt": "x", "multi_modal_data": {"audio": (1, 2)}}, "only pictures"),
    "no mapping": ({"prompt": "x", "multi_modal_data": [1]}, "mapping"),
    "token ids": ({"prompt_token_ids": [4], "multi_modal_data": {"image": picture(1)}}, "a prompt that is a text"),
    "names": ({**prompt(picture(1)), "multi_modal_uuids": {"image": ["a", "b"]}}, "2 names"),
    "settings": ({**prompt(picture(1)), "mm_processor_kwargs": {"size": 1}}, "own settings"),
    "too many": (prompt(*[picture(1)] * 3, text="<image>" * 3), "at most 2"),
}


@pytest.fixture(scope="module")
def limited(make: Make) -> Iterator[LLM]:
    with make(limit_mm_per_prompt={"image": 2}) as made:
        yield made


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_what_is_no_prompt_with_pictures_is_refused(limited: LLM, name: str) -> None:
    given, message = BAD_PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        limited.generate(given, GREEDY)
    assert len(tokens(limited, "still here")[0]) == 8


def test_a_prompt_with_pictures_is_neither_cut_nor_pooled(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="not cut"):
        llm.generate(prompt(picture(1)), SamplingParams(truncate_prompt_tokens=5))
    with pytest.raises(InvalidRequest, match="prompts that are pooled are text"):
        llm.embed(prompt(picture(1)))


def test_a_model_of_text_takes_no_pictures(make_shallow: Make) -> None:
    with make_shallow() as text, pytest.raises(InvalidRequest, match="takes no pictures"):
        text.generate(prompt(picture(1)), GREEDY)


def test_a_chat_template_beside_the_processor_is_found(make_engine: Make, tmp_path: Path) -> None:
    save_picture_model(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with make_engine(str(tmp_path), max_model_len=256) as llm:
        part = {"type": "image_pil", "image_pil": picture(1)}
        assert llm.chat(said(part), GREEDY, use_tqdm=False)[0].prompt.startswith(
            "<|im_start|>User:What is this? <image>"
        )


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_a_language_models_values_that_are_left_out_are_llamas(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    save_picture_model(tmp_path, kind)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["text_config"]["rms_norm_eps"]
    file.write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path).text_config.rms_norm_eps
    assert open_model(str(tmp_path)).model_config.norm_eps == expected


def test_windows_of_no_patches_are_refused(make_engine: Make, tmp_path: Path) -> None:
    save_picture_model(tmp_path, "qwen2_5_vl")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["window_size"] = 4
    file.write_text(json.dumps(config))
    with (
        pytest.raises(UnsupportedArchitecture, match="windows of its vision transformer"),
        make_engine(str(tmp_path), max_model_len=256),
    ):
        pass


def test_without_pillow_the_extra_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"hardpoint\[vision\]"):
        llm.generate(prompt(object()), GREEDY)
