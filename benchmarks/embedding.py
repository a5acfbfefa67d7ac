"""Embeddings of an encoder beside transformers, on the same texts.

    python benchmarks/embedding.py [--threads 2] [--dtype bfloat16] [--texts 1000] [--rounds 3] [--batch 32] [--json FILE]

The model has BERT-base's shapes and seeded random weights; the texts are token ids of lengths as sentences and paragraphs have them. The
two take turns, hardpoint's engine in a process of its own, where torch's threads wait asleep. transformers runs batches of texts sorted
by length, padded to the longest of a batch, through its scaled-dot-product attention, in float32 or bfloat16, whichever is faster on the
machine for some of the texts: without instructions for bfloat16 that is float32. hardpoint takes the texts as they come, in steps of a
budget of tokens, without padding. Both give the mean of a text's hidden states, normalised, and the two are compared.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import report
import torch
from torch.nn import functional

from hardpoint import LLM, PoolingParams
from hardpoint_cpu import _native

BERT_BASE = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def texts(count: int) -> list[list[int]]:
    """Return token ids of texts whose lengths are spread over two orders of magnitude, 64 tokens in the median."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(64), 0.7, count), 8, 512).astype(int)
    return [[101, *rng.integers(1000, 30000, length - 2).tolist(), 102] for length in lengths]


def of_transformers(model: torch.nn.Module, prompts: Sequence[Sequence[int]], batch: int) -> torch.Tensor:
    """Return the embeddings [texts, hidden size], in batches by length."""
    found = torch.empty(len(prompts), BERT_BASE["hidden_size"])
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    with torch.inference_mode():
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            longest = max(len(prompts[index]) for index in chosen)
            ids = torch.zeros(len(chosen), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(chosen):
                ids[row, : len(prompts[index])] = torch.tensor(prompts[index])
                mask[row, : len(prompts[index])] = 1
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found[chosen] = functional.normalize(means, dim=-1)
    return found


def faster_dtype(model: torch.nn.Module, prompts: Sequence[Sequence[int]], batch: int) -> torch.dtype:
    """Return the dtype in which transformers is faster with these texts, each after one text to warm up."""
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = copy.deepcopy(model).to(dtype)
        of_transformers(of_dtype, prompts[:1], batch)
        start = time.perf_counter()
        of_transformers(of_dtype, prompts, batch)
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=lambda dtype: seconds[dtype])


def of_hardpoint(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Return the embeddings [texts, hidden size]."""
    outputs = llm.embed(prompts, PoolingParams(pooling="mean"), use_tqdm=False)
    return torch.from_numpy(np.stack([output.outputs.embedding for output in outputs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="texts of a batch of transformers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import transformers

    prompts = texts(options.texts)
    tokens = sum(map(len, prompts))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT_BASE)
    with tempfile.TemporaryDirectory() as folder:
        peer = transformers.BertModel(config, add_pooling_layer=False).eval()
        peer.to(getattr(torch, options.dtype)).save_pretrained(folder)
        settings = {"dtype": options.dtype, "backend": "cpu", "threads": options.threads, "skip_tokenizer_init": True}
        llm = LLM(folder, **settings, engine_process=True)
    theirs_dtype = faster_dtype(peer, prompts[: options.batch], options.batch)
    peer.to(theirs_dtype)
    seconds: dict[str, list[float]] = {"hardpoint": [], "transformers": []}
    for _ in range(options.rounds):
        start = time.perf_counter()
        ours = of_hardpoint(llm, prompts)
        between = time.perf_counter()
        theirs = of_transformers(peer, prompts, options.batch)
        seconds["hardpoint"].append(between - start)
        seconds["transformers"].append(time.perf_counter() - between)
    llm.shutdown()
    least = float((ours * theirs).sum(-1).min())
    rates = {name: [tokens / one for one in taken] for name, taken in seconds.items()}
    ours_rate, theirs_rate = (report.median(rates[name]) for name in ("hardpoint", "transformers"))
    met = ours_rate >= 1.3 * theirs_rate
    verdict = report.Verdict(
        "tokens/s of embedding", ours_rate, theirs_rate, "transformers", "≥ 1.3 × transformers", met
    )
    print(
        f"{len(prompts)} texts, {tokens} tokens, {options.dtype} (transformers: {theirs_dtype}), {_native.isa()}; "
        f"least cosine of the two: {least:.5f}"
    )
    rows = [[name, *(f"{one:.2f}" for one in taken)] for name, taken in seconds.items()]
    print(report.table(["seconds", *(str(number + 1) for number in range(options.rounds))], rows))
    print(report.verdict_table([verdict]))
    if options.json:
        report.write_json(
            options.json,
            {
                "command": report.command(),
                "machine": report.machine(("hardpoint-cpu", "torch", "transformers")),
                "isa": _native.isa(),
                "threads": options.threads,
                "dtype": options.dtype,
                "dtype_of_transformers": str(theirs_dtype),
                "texts": len(prompts),
                "tokens": tokens,
                "batch_of_transformers": options.batch,
                "least_cosine": least,
                "seconds": seconds,
                "verdicts": [verdict.as_dict()],
            },
        )


if __name__ == "__main__":
    main()
