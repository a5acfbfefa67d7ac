"""Which weights of a model are stored in quantised blocks, by what the kernel set multiplies by: the checkpoint's own, or rounded ones."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.blocks import BlockFormat, Quantization
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.interfaces.kernels import LinearRequest
from hardpoint.layers import Experts, Linear, LMHead, VocabEmbedding
from hardpoint.quantization import Blocks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from hardpoint.interfaces.dtypes import DType
    from hardpoint.interfaces.kernels import KernelSet
    from hardpoint.layers import StoredWeight
    from hardpoint.models.family import Family
    from hardpoint.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def formats_of(checkpoint: Checkpoint) -> Counter[BlockFormat]:
    """Return how many tensors of a checkpoint are in each format of blocks."""
    found = (checkpoint.block_format(name) for name in checkpoint.shapes())
    return Counter(format for format in found if format is not None)


def wants_blocks(
    quantization: Quantization, checkpoint: Checkpoint, kernels: KernelSet | None, where: Path, *, runs_layers: bool
) -> bool:
    """Whether weights are to be stored in blocks: as the checkpoint has them, or rounded.

    Args:
        runs_layers: whether the core's layers run the model, or a program made of them.

    Raises:
        CapabilityRefused: GGUF or rounding was asked for and is not possible; says what is.
    """
    if quantization is Quantization.NONE:
        return False
    found = formats_of(checkpoint)
    known = frozenset[BlockFormat]() if kernels is None else kernels.block_formats()
    if quantization is Quantization.AUTO:
        return runs_layers and any(not known.isdisjoint(format.forms) for format in found)
    reasons, unknown = [], {format for format in found if known.isdisjoint(format.forms)}
    if quantization.rounds_to is not None:
        unknown = set(quantization.rounds_to) - known
        # Floating numbers of 8 bits can be rounded as those of 16 can.
        if rounded := {format: count for format, count in found.items() if format is not BlockFormat.FP8}:
            counts = ", ".join(f"{count} in {format}" for format, count in sorted(rounded.items()))
            reasons.append(
                f"the checkpoint is quantised already ({counts}): quantization='auto' multiplies by what it has"
            )
    elif not found:
        reasons.append("the checkpoint has no weights in blocks of GGUF")
    if unknown:
        can = ", ".join(sorted(known)) or "none"
        reasons.append(f"the backend does not multiply by blocks of {', '.join(sorted(unknown))} (it does by: {can})")
    if not runs_layers:
        reasons.append("the model is run by transformers' code, which takes weights in the model's dtype")
    if reasons:
        raise CapabilityRefused(
            f"{where} cannot be run with quantization='{quantization}'",
            tuple(reasons),
            hint="quantization='none' runs with weights in the model's dtype",
        )
    return True


def store_in_blocks(
    model: Family,
    checkpoint: Checkpoint,
    kernels: KernelSet,
    dtype: DType,
    quantization: Quantization,
    *,
    by_layers: bool,
) -> None:
    """Let the weights of a model on the meta device, or of a rank's share, be stored in blocks where it can be.

    Args:
        by_layers: whether each layer multiplies for itself; otherwise a program for the whole model does.
    """
    heads = [module for module in model.modules() if isinstance(module, LMHead) and module.is_tied]
    for path, stored in model.stored_weights().items():
        owner, _, leaf = path.rpartition(".")
        layer = model.get_submodule(owner)
        if leaf != "weight" or not isinstance(layer, Linear | LMHead | VocabEmbedding):
            continue
        if quantization.rounds_to is None:
            wanted = _common_format(stored, checkpoint)
        else:
            wanted = _rounded_format(model, owner, layer, quantization.rounds_to)
        forms = () if wanted is None else wanted.forms
        known = [form for form in forms if form in kernels.block_formats() and _has_whole_blocks(stored, form)]
        if not known:
            if quantization.rounds_to is not None and forms:
                columns, size = stored.shards[0].num_columns, forms[-1].elements
                logger.info("%s is not rounded: rows of %d elements are not whole blocks of %d", path, columns, size)
            continue
        format = known[0]
        program = None
        if by_layers:
            planned = kernels.plan_linear(LinearRequest(stored.num_rows, stored.shards[0].num_columns, dtype, format))
            if isinstance(planned, Refusal):
                logger.info("%s is stored in %s: %s", path, dtype, "; ".join(planned.reasons))
                continue
            program = planned
        tied = [head for head in heads if head.weight is layer.weight]
        method = Blocks(format, program)
        layer.store_in_blocks(method, dtype.to_torch())
        layer.method = method
        for head in tied:
            assert isinstance(layer, VocabEmbedding)
            head.tie(layer)


def _common_format(stored: StoredWeight, checkpoint: Checkpoint) -> BlockFormat | None:
    """Return the format of all tensors that a parameter is stored from; None where they differ."""
    formats = {checkpoint.block_format(shard.name) for shard in stored.shards}
    format = formats.pop()
    return None if formats else format


def _rounded_format(
    model: Family, owner: str, layer: nn.Module, formats: tuple[BlockFormat, BlockFormat]
) -> BlockFormat | None:
    """Return the format that a dense parameter is rounded to; None for a router of experts.

    A router's few rows decide where tokens go, so that an error there is no small one.
    """
    around = model.get_submodule(owner.rpartition(".")[0])
    if any(isinstance(part, Experts) for part in around.children()):
        logger.info("%s is not rounded: it is a router of experts", owner)
        return None
    return formats[0] if isinstance(layer, Linear) else formats[1]


def _has_whole_blocks(stored: StoredWeight, format: BlockFormat) -> bool:
    edges = [column for shard in stored.shards for column in shard.columns or (shard.num_columns,)]
    return all(column % format.elements == 0 for column in edges)
