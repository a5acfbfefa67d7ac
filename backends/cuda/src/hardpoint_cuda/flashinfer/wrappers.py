"""FlashInfer's wrappers of one plan: which sequences of a step go to which, what is planned on the host, and what graphs keep.

Of a step the decodes go to one wrapper and all other sequences to another, once for each kind of layer. FlashInfer's `plan` divides the
work on the host: it takes index arrays there, without waiting for the device, and copies what it made from host memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces.errors import InvalidBatch
from hardpoint_cuda.flashinfer.signatures import DECODE, PREFILL

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from hardpoint.interfaces import AttentionLayer, AttentionPlan, StepBatch
    from hardpoint.interfaces.batch import Int32Array

_LAYOUT = "HND"
WORKSPACE = 128 << 20
"""Bytes for the partial results of split contexts, which FlashInfer recommends. Outside of graphs it needs two tiles of at most 128 queries
for each multiprocessor: 17 MB for 132 of them and heads of 128 elements in float32."""


@dataclass(frozen=True)
class Kind:
    """What layers differ in to FlashInfer's plans; `window_left` is the number of keys before the query's own, -1 for all."""

    num_heads: int
    scale: float
    window_left: int
    soft_cap: float

    @classmethod
    def of(cls, layer: AttentionLayer) -> Kind:
        """Return a layer's kind."""
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        return cls(layer.num_heads, layer.scale, window, layer.soft_cap or 0.0)


@dataclass(frozen=True)
class Sequences:
    """Sequences of a step in the arrays of FlashInfer, int32.

    Attributes:
        queries: [sequences + 1], where each sequence's queries begin.
        starts: [sequences + 1], where each sequence's pages begin; on the host, as are queries and last.
        last: [sequences], tokens in each sequence's last page, 0 for a sequence without pages.
        pages: on the device.
    """

    queries: Tensor
    starts: Tensor
    last: Tensor
    pages: Tensor

    @classmethod
    def of(cls, batch: StepBatch, which: npt.NDArray[Any], block_size: int, device: torch.device) -> Sequences:
        """Gather the arrays of some of a batch's sequences, and send their pages on the way to the device."""
        contexts = batch.context_lens[which]
        blocks = -(-contexts // block_size)
        table = batch.block_table[batch.rows[which], : blocks.max(initial=0)]
        arrays = (
            np.append(0, np.cumsum(np.diff(batch.query_start)[which])),
            np.append(0, np.cumsum(blocks)),
            contexts - np.maximum(blocks - 1, 0) * block_size,
            table[np.arange(table.shape[1]) < blocks[:, None]],
        )
        # A pinned buffer goes back to torch's host allocator, which does not give it away before its transfers are done.
        host = torch.empty(sum(map(len, arrays)), dtype=torch.int32, pin_memory=device.type != "cpu")
        np.concatenate(arrays, out=host.numpy(), casting="same_kind")
        queries, starts, last, pages = host.split([len(array) for array in arrays])
        return cls(queries, starts, last, pages.to(device, non_blocking=True))

    def for_decode(self) -> dict[str, Tensor]:
        """Return the arrays by the names that decodes have for them."""
        return {"indptr": self.starts, "indices": self.pages, "last_page_len": self.last}

    def for_prefill(self) -> dict[str, Tensor]:
        """Return the arrays by the names that prefills have for them."""
        named = {"paged_kv_indptr": self.starts, "paged_kv_indices": self.pages, "paged_kv_last_page_len": self.last}
        return {"qo_indptr": self.queries, **named}


class Wrapper:
    """One of FlashInfer's wrappers, and when it can be planned anew."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.run = wrapper.run
        self._wrapper = wrapper
        self._copied = None if device.type == "cpu" else torch.cuda.Event()

    def plan(self, **arguments: Any) -> None:
        """Plan; waits for the device only where it has not yet copied what the last plan made, which the plan writes over."""
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(**arguments)
        if self._copied is not None:
            self._copied.record()


@dataclass
class Captured:
    """What captured steps keep: index arrays, which graphs of all sizes share, and wrappers by the number of sequences."""

    starts: Tensor
    last: Tensor
    pages: Tensor
    floats: Tensor
    wrappers: dict[int, list[Wrapper]] = field(default_factory=dict)
    is_open: bool = True

    @property
    def most(self) -> int:
        """Most sequences of a step."""
        return len(self.last)


@dataclass(frozen=True)
class FlashInferStep:
    """Metadata of one step.

    Attributes:
        base: the step's metadata of the kernels that write keys and values.
        kernels: that the step was prepared by.
        decodes: rows, from the first, whose sequences have one query each.
        end: of the rows that belong to sequences.
        decode, prefill: wrappers by kind of layer; none where the step has no such sequences.
        is_static: the wrappers serve every step of their number of sequences: a captured one follows what was prepared last.
    """

    base: Any
    kernels: Kernels
    decodes: int
    end: int
    decode: list[Wrapper]
    prefill: list[Wrapper]
    is_static: bool


class Kernels:
    """FlashInfer's kernels of one plan's layers.

    Raises:
        Exception: whatever FlashInfer raises when it is imported or makes its wrappers.
    """

    def __init__(self, plan: AttentionPlan, device: torch.device) -> None:
        import flashinfer  # type: ignore[import-not-found]

        self._decode_class, self._prefill_class = getattr(flashinfer, DECODE), getattr(flashinfer, PREFILL)
        self._plan, self._device = plan, device
        layers = plan.request.layers
        self._kinds = list(dict.fromkeys(map(Kind.of, layers)))
        self._kind_of = [self._kinds.index(Kind.of(layer)) for layer in layers]
        is_scaled = plan.request.kv_dtype is not plan.request.dtype
        self._scales = [{"k_scale": layer.k_scale, "v_scale": layer.v_scale} if is_scaled else {} for layer in layers]
        # FlashInfer asks for zeros at the first use.
        self._floats = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._decode = [self._wrapper(self._decode_class, use_tensor_cores=True, backend="fa2") for _ in self._kinds]
        self._prefill = [self._wrapper(self._prefill_class, backend="auto") for _ in self._kinds]
        self._captured: Captured | None = None
        self._current: FlashInferStep | None = None

    def prepare(self, batch: StepBatch, base: Any) -> FlashInferStep:
        """Plan a step whose arrays were found to fit together."""
        queries, decodes = np.diff(batch.query_start), batch.num_decodes
        if static := self._static_wrappers(batch, queries):
            self._plan_decodes(
                static, Sequences.of(batch, np.arange(batch.num_seqs), self._plan.block_size, self._device)
            )
            return FlashInferStep(base, self, batch.num_seqs, batch.num_seqs, static, [], is_static=True)
        # What has no query is padding.
        others = decodes + np.flatnonzero(queries[decodes:])
        if decodes:
            self._plan_decodes(
                self._decode, Sequences.of(batch, np.arange(decodes), self._plan.block_size, self._device)
            )
        if len(others):
            arrays = Sequences.of(batch, others, self._plan.block_size, self._device).for_prefill()
            for wrapper, kind in zip(self._prefill, self._kinds, strict=True):
                wrapper.plan(**arrays, head_dim_qk=self._plan.kv_cache.head_dim, causal=True, **self._numbers(kind))
        self._current = FlashInferStep(
            base,
            self,
            decodes,
            int(batch.query_start[-1]),
            self._decode if decodes else [],
            self._prefill if len(others) else [],
            is_static=False,
        )
        return self._current

    def forward(self, layer: int, q: Tensor, kv_cache: Tensor, step: FlashInferStep, out: Tensor) -> None:
        """Attend in one layer; raises InvalidBatch for a step that is not the one prepared last."""
        if not step.is_static and step is not self._current:
            raise InvalidBatch("FlashInfer's wrappers hold one step", found="another one was prepared since")
        pages, kind = kv_cache.unbind(0), self._kind_of[layer]
        # The kernels write rows without a gap.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        parts = ((step.decode, slice(0, step.decodes)), (step.prefill, slice(step.decodes, step.end)))
        for wrappers, rows in parts:
            if wrappers:
                wrappers[kind].run(q[rows], pages, out=whole[rows], **self._scales[layer])
        if whole is not out:
            out[: step.end].copy_(whole[: step.end])

    def begin_capture(self, max_num_seqs: int) -> None:
        """Allocate what captured steps keep. Steps that are prepared from here on until `end_capture` are those to be captured."""
        most_pages = max_num_seqs * -(-self._plan.request.max_context // self._plan.block_size)
        sizes = (max_num_seqs + 1, max_num_seqs, most_pages)
        starts, last, pages = (torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes)
        self._captured = Captured(starts, last, pages, self._floats)

    def end_capture(self) -> None:
        """From here on steps of decodes with as many sequences as were captured are those to be replayed."""
        if self._captured is not None:
            self._captured.is_open = False

    def forget_captures(self) -> None:
        """Keep nothing for captured steps."""
        self._captured = None

    def _static_wrappers(self, batch: StepBatch, queries: Int32Array) -> list[Wrapper]:
        """Return the wrappers of a step that is to be captured or replayed; none for another one."""
        captured, seqs = self._captured, batch.num_seqs
        if captured is None or not seqs == batch.num_tokens <= captured.most or queries[batch.num_decodes :].any():
            return []
        if captured.is_open and seqs not in captured.wrappers:
            captured.wrappers[seqs] = [self._static_wrapper(captured, seqs, kind) for kind in self._kinds]
        return captured.wrappers.get(seqs, [])

    def _static_wrapper(self, captured: Captured, seqs: int, kind: Kind) -> Wrapper:
        """Return a wrapper for steps of the given number of sequences, which are planned alike whatever their contexts are."""
        wrapper = self._decode_class(
            float_workspace_buffer=captured.floats,
            kv_layout=_LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=captured.starts[: seqs + 1],
            paged_kv_indices_buffer=captured.pages,
            paged_kv_last_page_len_buffer=captured.last[:seqs],
            backend="fa2",
        )
        nothing = torch.zeros(seqs + 1, dtype=torch.int32)
        floats, ints = wrapper.workspace_size(
            indptr=nothing,
            indices=nothing[:0],
            last_page_len=nothing[:seqs],
            head_dim=self._plan.kv_cache.head_dim,
            **self._numbers(kind),
        )
        if floats > len(captured.floats):
            captured.floats = torch.zeros(floats, dtype=torch.uint8, device=self._device)
        # Its own memory for numbers is made for any step: 8 MiB on the device, and on the host.
        own = torch.empty(ints, dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(float_workspace_buffer=captured.floats, int_workspace_buffer=own)
        return Wrapper(wrapper, self._device)

    def _wrapper(self, make: Any, **options: Any) -> Wrapper:
        return Wrapper(make(float_workspace_buffer=self._floats, kv_layout=_LAYOUT, **options), self._device)

    def _plan_decodes(self, wrappers: list[Wrapper], sequences: Sequences) -> None:
        for wrapper, kind in zip(wrappers, self._kinds, strict=True):
            wrapper.plan(**sequences.for_decode(), head_dim=self._plan.kv_cache.head_dim, **self._numbers(kind))

    def _numbers(self, kind: Kind) -> dict[str, Any]:
        """Return the arguments of a kind's plans, whatever the step."""
        request = self._plan.request
        return {
            "num_qo_heads": kind.num_heads,
            "num_kv_heads": self._plan.kv_cache.num_kv_heads,
            "page_size": self._plan.block_size,
            "sm_scale": kind.scale,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": request.dtype.to_torch(),
            "kv_data_type": request.kv_dtype.to_torch(),
        }
