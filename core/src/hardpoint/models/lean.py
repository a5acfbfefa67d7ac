"""The lean decoder: one torch module for every family of `families`, on any device that torch has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces.allocator import WEIGHTS
from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.errors import WorkerError
from hardpoint.interfaces.kernels import Activation, DecoderOutput
from hardpoint.models.base import RunnableModel
from hardpoint.models.parallel import Ranks, vocabulary_width
from hardpoint.models.rereading import Restorer, extents
from hardpoint.models.weights import check_same_model, lean_checkpoint, load_weights, update_weights

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.interfaces.collectives import Collectives
    from hardpoint.interfaces.dtypes import DType
    from hardpoint.interfaces.kernels import KernelSet
    from hardpoint.models.checkpoint import Checkpoint
    from hardpoint.models.families import LeanModel
    from hardpoint.models.source import ModelSource
    from hardpoint.models.weights import Progress


class _Weights(nn.Module):
    """The decoder's weights and rotary tables under the names of `DecoderSpec`, on the meta device until materialised."""

    def __init__(self, model: LeanModel, dtype: torch.dtype, max_context: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in model.spec.attention)
        for name, shape in model.weight_shapes().items():
            # Weights stored as `weight - 1` lose their precision when the sum is rounded to 8 bits.
            kept = torch.float32 if model.offset(name) else dtype
            owner, leaf = self._owner(name)
            owner.register_parameter(
                leaf, nn.Parameter(torch.empty(shape, dtype=kept, device="meta"), requires_grad=False)
            )
        for index in range(len(model.ropes)):
            for part in ("cos", "sin"):
                table = torch.empty((max_context, model.spec.rotary_dim // 2), dtype=torch.float32, device="meta")
                self.register_buffer(f"{part}_{index}", table, persistent=False)

    def weight(self, name: str) -> Tensor:
        """Return a weight by the spec's name."""
        owner, leaf = self._owner(name)
        return owner.get_parameter(leaf)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.get_submodule(path), leaf


class _Layer:
    """One layer's weights, looked up once."""

    def __init__(self, weights: _Weights, index: int, shape: AttentionLayer, table: int) -> None:
        def get(name: str) -> Tensor | None:
            return getattr(weights.layers[index], name, None)

        def need(name: str) -> Tensor:
            return weights.weight(f"layers.{index}.{name}")

        self.index, self.shape, self.table = index, shape, table
        self.input_norm, self.mlp_norm = need("input_norm"), need("mlp_norm")
        self.qkv, self.o, self.gate_up, self.down = need("qkv"), need("o"), need("gate_up"), need("down")
        self.qkv_bias, self.o_bias = get("qkv_bias"), get("o_bias")
        self.q_norm, self.k_norm = get("q_norm"), get("k_norm")
        self.attention_out_norm, self.mlp_out_norm = get("attention_out_norm"), get("mlp_out_norm")


class LeanDecoder(RunnableModel):
    """A `DecoderSpec` in torch, or a rank's share of one.

    Ranks that share layers sum after attention and after the feed-forward; a stage gets the residual stream of the stage before
    it, and a step returns nothing on other stages than the last.

    Norms, rotary embedding, activation and argmax come from the kernel set where there is one. Matrix products are torch's over the
    allocator's own weights: a kernel set's packed copies would lie outside the memory that sleep gives back.
    """

    path: ClassVar[str] = "lean"

    def __init__(
        self,
        model: LeanModel,
        *,
        dtype: DType,
        attention: AttentionBackend,
        kernels: KernelSet | None,
        allocator: DeviceAllocator,
        max_context: int,
        torch_device: str,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._place = model.place
        self._tensor = ranks.tensor if ranks is not None else None
        self._pipeline = ranks.pipeline if ranks is not None else None
        self._seed = seed
        self._element_type = dtype
        self._without_extents: frozenset[str] = frozenset()
        self._spec = model.spec
        self._attention = attention
        self._kernels = kernels
        # The contract's norms take weights in the activations' dtype; weights kept in float32 go through torch.
        self._norm_kernels = None if model.norm_offset else kernels
        self._device = torch.device(torch_device)
        self._dtype = dtype.to_torch()
        self._weights = _Weights(model, self._dtype, max_context)
        allocator.materialise(self._weights, WEIGHTS)
        for index, (cos, sin) in enumerate(model.rope_tables(max_context)):
            self._weights.get_buffer(f"cos_{index}").copy_(cos)
            self._weights.get_buffer(f"sin_{index}").copy_(sin)
        place, get = self._place, self._weights.weight
        whole = (model.whole or model).spec
        self._vocab_size = whole.vocab_size
        self._vocab_width = vocabulary_width(whole.vocab_size, place.tensor_size)
        self._embed = get("embed") if place.is_first else None
        self._head = get("embed" if self._spec.tied else "head") if place.is_last else None
        self._final_norm = get("final_norm") if place.is_last else None
        self._tables = [
            (self._weights.get_buffer(f"cos_{index}"), self._weights.get_buffer(f"sin_{index}"))
            for index in range(len(model.ropes))
        ]
        self._layers = [
            _Layer(self._weights, index, shape, self._spec.rope_tables[index])
            for index, shape in enumerate(self._spec.attention)
        ]

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        only: Collection[str] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Fill the weights; raises CorruptWeights. For `only` and `begin` see `load_weights`."""
        with torch.no_grad():
            load_weights(
                self._model,
                checkpoint,
                self._weights.weight,
                lambda name, tensor: None,
                progress,
                only=only,
                begin=begin,
            )

    def weight_names(self) -> frozenset[str]:
        return self._model.weight_names()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], written: set[str] | None = None) -> int:
        with torch.no_grad():
            return update_weights(self._model, weights, self._weights.weight, lambda name, tensor: None, written)

    def reload(self, source: ModelSource, written: set[str] | None = None) -> int:
        check_same_model(self._model, source, self._element_type)
        names = self.weight_names()
        begin = None if written is None else partial(written.update, names)
        self.load(lean_checkpoint(source, self._model, self._seed), begin=begin)
        return len(self._model.checkpoint_shapes())

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        checkpoint = lean_checkpoint(source, self._model, self._seed)
        restorer = Restorer(self._restore, source)
        without: set[str] = set()
        for weight in self._model.sources:
            stored = extents(checkpoint, self._model, weight, self._element_type)
            if stored is None:
                without.add(weight)
            allocator.declare_source(self._weights.weight(weight), restorer if stored is None else stored)
        self._without_extents = frozenset(without)

    def _restore(self, source: ModelSource) -> None:
        self.load(lean_checkpoint(source, self._model, self._seed), only=self._without_extents)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._weights.parameters())

    @property
    def scratch_bytes(self) -> int:
        return 0

    def run(self, batch: StepBatch, metadata: Any, kv_cache: Tensor, rows: Tensor, output: DecoderOutput) -> Tensor:
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        return self.compute(token_ids, positions, metadata, kv_cache, rows.to(self._device), output)

    @torch.no_grad()
    def compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: Any,
        kv_cache: Tensor,
        rows: Tensor,
        output: DecoderOutput,
    ) -> Tensor:
        """Run one step whose inputs are on the device, and return what `run` does.

        Every shape follows from those of the arguments, and the host is never waited for, so that a step of given shapes can be
        captured once and replayed with other contents.

        Args:
            token_ids: int64[T].
            positions: int64[T].
            metadata: what the attention backend's `prepare` returned for the step.
            kv_cache: the whole cache, all layers.
            rows: int32[rows], indices of tokens in the step.
        """
        if self._embed is not None:
            residual = self._embedded(token_ids, self._embed)
        else:
            residual = self._layers[0].input_norm.new_empty((len(token_ids), self._spec.hidden_size), dtype=self._dtype)
            self._link().receive(residual, self._place.stage - 1)
        hidden = self._norm(residual, self._layers[0].input_norm)
        for layer in self._layers:
            hidden = self._summed(self._attend(layer, hidden, positions, kv_cache[layer.index], metadata))
            hidden = self._add_and_norm(hidden, residual, layer.attention_out_norm, layer.mlp_norm)
            hidden = self._feed_forward(layer, hidden)
            last = layer.index + 1 == len(self._layers)
            if last and self._final_norm is not None:
                # Nothing after this point mixes tokens, so only the wanted rows go on.
                hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
            hidden = self._summed(hidden)
            following = self._final_norm if last else self._layers[layer.index + 1].input_norm
            if following is None:
                residual += hidden if layer.mlp_out_norm is None else self._norm(hidden, layer.mlp_out_norm)
                self._link().send(residual, self._place.stage + 1)
                return residual[:0]
            hidden = self._add_and_norm(hidden, residual, layer.mlp_out_norm, following)
        return hidden if output is DecoderOutput.HIDDEN else self._logits(hidden, output)

    def _embedded(self, token_ids: Tensor, embed: Tensor) -> Tensor:
        if self._tensor is None:
            hidden = functional.embedding(token_ids, embed)
        else:
            own = token_ids - self._model.first_token
            elsewhere = (own < 0) | (own >= len(embed))
            hidden = functional.embedding(own.masked_fill(elsewhere, 0), embed).masked_fill(elsewhere[:, None], 0)
            self._tensor.all_reduce(hidden)
        return hidden if self._spec.embed_scale == 1.0 else hidden * self._spec.embed_scale

    def _summed(self, hidden: Tensor) -> Tensor:
        """Sum the parts of all ranks that share the layer, in place; nothing to sum where no row is wanted."""
        if self._tensor is not None and len(hidden):
            self._tensor.all_reduce(hidden)
        return hidden

    def _link(self) -> Collectives:
        if self._pipeline is None:
            raise WorkerError("a stage has no link to the other stages", hint="Make the decoder with its ranks")
        return self._pipeline

    def _attend(self, layer: _Layer, hidden: Tensor, positions: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        shape = layer.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = functional.linear(hidden, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        self._rotate(q, k, positions, *self._tables[layer.table])
        self._attention.write_kv(layer.index, k, v, kv_cache, metadata)
        out = hidden.new_empty((hidden.shape[0], heads, dim))
        self._attention.forward(layer.index, q, k, v, kv_cache, metadata, out)
        return functional.linear(out.view(-1, heads * dim), layer.o, layer.o_bias)

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate_up = functional.linear(hidden, layer.gate_up)
        if self._kernels is not None:
            return functional.linear(self._kernels.gated_activation(gate_up, self._spec.activation), layer.down)
        gate, up = gate_up.chunk(2, dim=-1)
        silu = self._spec.activation is Activation.SILU
        activated = functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")
        return functional.linear(activated * up, layer.down)

    def _logits(self, hidden: Tensor, output: DecoderOutput) -> Tensor:
        assert self._head is not None, "only the last stage has logits"
        logits = functional.linear(hidden, self._head).float()
        cap = self._spec.logit_soft_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self._tensor is not None:
            return self._of_all_ranks(logits, self._tensor, output)
        return logits if output is DecoderOutput.LOGITS else self._argmax(logits)

    def _of_all_ranks(self, logits: Tensor, tensor: Collectives, output: DecoderOutput) -> Tensor:
        """Return the logits, or the best tokens, of the whole vocabulary from float32[rows, columns] of this rank's part."""
        count, columns = logits.shape
        if output is DecoderOutput.LOGITS:
            if count == 0:
                return logits.new_empty((0, self._vocab_size))
            padded = functional.pad(logits, (0, self._vocab_width - columns))
            # Only the last ranks' parts are padded, so that the padding is at the end.
            return tensor.all_gather(padded, 1)[:, : self._vocab_size].contiguous()
        best = self._argmax(logits)
        if count == 0:
            return best
        # float32 has all integers up to 2^24, more than any vocabulary.
        own = torch.stack((logits.gather(1, best[:, None])[:, 0], (best + self._model.first_token).float()), dim=1)
        values, tokens = tensor.all_gather(own, 1).view(count, -1, 2).unbind(-1)
        # The lowest rank of the highest value has the lowest id.
        return tokens.gather(1, self._argmax(values.contiguous())[:, None])[:, 0].long()

    def _argmax(self, logits: Tensor) -> Tensor:
        return self._kernels.argmax(logits) if self._kernels is not None else logits.argmax(dim=-1)

    def _add_and_norm(self, x: Tensor, residual: Tensor, out_norm: Tensor | None, weight: Tensor) -> Tensor:
        """Add x, normalised by `out_norm` where the family does, to `residual` in place, and return the sum normalised."""
        if out_norm is not None:
            x = self._norm(x, out_norm)
        if self._norm_kernels is not None:
            return self._norm_kernels.add_rms_norm(x, residual, weight, self._spec.norm_eps)
        residual += x
        return self._norm(residual, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._norm_kernels is not None:
            return self._norm_kernels.rms_norm(x, weight, self._spec.norm_eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._spec.norm_eps) * weight).to(x.dtype)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        if self._kernels is not None:
            self._kernels.rotary(q, k, positions, cos, sin)
            return
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        half = cos.shape[-1]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            x[..., : 2 * half] = rotated
