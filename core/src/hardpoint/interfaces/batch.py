"""What crosses between scheduler, engine and worker in one step. Plain arrays and values, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    LogitsProcessor: TypeAlias = Callable[[list[int], Tensor], Tensor]
    Int32Array: TypeAlias = npt.NDArray[np.int32]
    Int64Array: TypeAlias = npt.NDArray[np.int64]
    FloatArray: TypeAlias = npt.NDArray[np.float32]
    AnyArray: TypeAlias = npt.NDArray[Any]
else:
    # Descriptors import this package, and a descriptor must not cost the import of numpy.
    Int32Array = Int64Array = FloatArray = AnyArray = LogitsProcessor = Any


def _no_rows() -> Int32Array:
    import numpy

    return numpy.empty(0, numpy.int32)


def _no_tokens() -> Int64Array:
    import numpy

    return numpy.empty(0, numpy.int64)


def _no_pairs() -> Int32Array:
    import numpy

    return numpy.empty((0, 2), numpy.int32)


@dataclass(slots=True)
class KVGroupSlots:
    """Where one KV cache group after the first has a step's keys and values; see `StepBatch.slot_mapping` and `.block_table`."""

    slot_mapping: Int32Array
    block_table: Int32Array


def _no_moves() -> Int64Array:
    import numpy

    return numpy.empty((0, 3), numpy.int64)


@dataclass(frozen=True, slots=True)
class TierMoves:
    """Blocks that a step moves between the device and the tiers below its prefix cache (`Worker.open_tiers`), all int64[k, 3].

    Slots are numbered from 0 in the host's memory, and go on on disk. A tag says which contents are meant: a worker keeps it with the
    bytes that it stores, and never takes others for them. A worker does the moves before all others of the step, in the order of the
    attributes.

    Attributes:
        demotions: (slot of the host, slot on disk, tag).
        stores: (device block, slot of the host, tag).
        loads: (slot, device block, tag).
    """

    demotions: Int64Array = field(default_factory=_no_moves)
    stores: Int64Array = field(default_factory=_no_moves)
    loads: Int64Array = field(default_factory=_no_moves)


@dataclass(frozen=True, slots=True)
class TierReport:
    """What became of a step's `TierMoves` on one rank, or on all.

    Attributes:
        failed_loads: rows of `TierMoves.loads` whose block was not there or not as it was stored, in rising order.
        lost: (slot, tag) of blocks that are not kept: moves of this step, or of earlier ones whose writing to disk has failed since.
        checksum_failures: blocks that were read and are not what was stored.
        io_errors: reads and writes of the disk that failed.
        seconds: that the host has spent on it.
    """

    failed_loads: tuple[int, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    checksum_failures: int = 0
    io_errors: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StepBatch:
    """One step's work: T tokens of R sequences, of which S rows are sampled.

    Nobody changes a batch. It is not frozen, because one is made in most steps, and setting its fields would take the larger part of
    the time.

    Decodes come first, then sequences with drafted tokens, then prefill chunks. The arrays hold until the step's output was taken, except
    for the block table, which changes with the next step: a worker reads it in `submit`. Before the forward, a worker performs
    `swap_out`, then `swap_in`, then `copies`, in this order; with steps in flight a step may have moves and no tokens. Steps take effect in
    the order in which they were submitted: a step may write to blocks and rows that earlier ones still use.

    Attributes:
        token_ids: int64[T], flattened over sequences; -1 for the token that a step in flight is sampling for the sequence, and with
            `WorkerConfig.draft_model` for a drafted token, which the worker makes.
        positions: int64[T], position of each token in its sequence.
        slot_mapping: int32[T], `block * block_size + offset` where the token's key and value go.
        query_start: int32[R + 1], cumulative number of tokens; sequence r has tokens `query_start[r]:query_start[r + 1]`.
        context_lens: int32[R], keys of each sequence after this step, the new ones included.
        block_table: int32[max_num_seqs, max_blocks_per_seq], persistent; a sequence keeps its row while it runs. In a group with a window
            the entries of blocks that no query of the step sees are block numbers that say nothing: such blocks may be other sequences'.
        rows: int32[R], row of each sequence in `block_table`.
        seq_ids: int64[R].
        num_decodes: how many sequences, from the first, have one token and a context.
        sample_rows: int32[S], index in 0..R of the sequence whose last token's logits are sampled; a prompt with n forks
            that ends in this step appears n times, and one with k drafted tokens 1 + k times.
        sample_seq_ids: int64[S], the sequence that each sample belongs to.
        swap_out: int32[k, 2], (device block, host block).
        swap_in: int32[k, 2], (host block, device block).
        copies: int32[k, 2], (source, destination) device blocks.
        preempted: int64[k], sequences preempted in this step.
        state_rows: int32[R], row of each sequence in the worker's table of per-sequence state; -1 for one that is not sampled yet. A
            sequence has its row from the first step that samples it (its `SequenceSampling` names it), through preemption, until it
            ended; then another one may have it. Empty in a batch that nothing samples.
        sample_state_rows: int32[S], the row of each sample's own sequence.
        sample_positions: int32[S], how many tokens each sample's sequence has produced before this one.
        more_groups: slots and block tables of the model's KV cache groups after the first, whose are `slot_mapping` and `block_table`
            (`ModelInfo.kv_group_windows`). All groups share one pool of blocks.
        row_copies: int32[k, 2], (source, destination) rows of `block_table`, of sequences that were forked, or became another beam: a
            worker that keeps recurrent states by rows reads all the sources before it writes a destination, before the forward.
        sample_tokens: int32[S], index in 0..T of the token whose logits are sampled, where some sequence has drafted tokens: guesses at
            what follows its last token, each of which is sampled as if all before it were right. Empty where all samples are of the
            sequences' last tokens.
        tier_moves: of blocks of the prefix cache, to and from its tiers; None for none. They come before `swap_out`.
    """

    token_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    block_table: Int32Array
    rows: Int32Array
    seq_ids: Int64Array
    num_decodes: int
    sample_rows: Int32Array
    sample_seq_ids: Int64Array
    swap_out: Int32Array
    swap_in: Int32Array
    copies: Int32Array
    preempted: Int64Array
    state_rows: Int32Array = field(default_factory=_no_rows)
    sample_state_rows: Int32Array = field(default_factory=_no_rows)
    sample_positions: Int32Array = field(default_factory=_no_rows)
    more_groups: tuple[KVGroupSlots, ...] = ()
    row_copies: Int32Array = field(default_factory=_no_pairs)
    sample_tokens: Int32Array = field(default_factory=_no_rows)
    tier_moves: TierMoves | None = None

    def sampled_tokens(self) -> Int32Array:
        """Return the index in 0..T of the token whose logits each sample is of, int32[S]."""
        if self.num_decodes == len(self.rows):
            return self.sample_rows
        return self.sample_tokens if len(self.sample_tokens) else self.query_start[self.sample_rows + 1] - 1

    def by_group(self) -> tuple[StepBatch, ...]:
        """Return the step as each KV cache group sees it: with the group's own slots and block table."""
        if not self.more_groups:
            return (self,)
        return self, *(
            replace(self, slot_mapping=group.slot_mapping, block_table=group.block_table, more_groups=())
            for group in self.more_groups
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in this step (T)."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in this step (R)."""
        return len(self.rows)


def in_groups(batch: StepBatch, num_groups: int, block_size: int) -> StepBatch:
    """Return a step for a model of so many KV cache groups, in each of which sequences have as many blocks of their own.

    Group g uses the blocks of the first one, all raised by g times the number of blocks that the batch's table counts.
    """
    shift = int(batch.block_table.max(initial=-1)) + 1
    more = [
        KVGroupSlots(batch.slot_mapping + group * shift * block_size, batch.block_table + group * shift)
        for group in range(1, num_groups)
    ]
    return replace(batch, more_groups=tuple(more))


class Pooling(StrEnum):
    """Which of a prompt's hidden states are taken: the last, their mean, the first, or each."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    ALL = "all"


class PoolingTask(StrEnum):
    """What is made of the pooled hidden states of a prompt: nothing more, or the logits of the model's labels."""

    EMBED = "embed"
    CLASSIFY = "classify"


class LogprobsMode(StrEnum):
    """What is returned of the tokens that were possible at a position.

    RAW values are of the logits as the model computed them, PROCESSED ones of those that the token was drawn from, after all processors,
    temperature and truncation. LOGPROBS are log probabilities, LOGITS the logits themselves; minus infinity where a token was not possible.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How one sequence is sampled; sent to the worker once, with the step in which its first token is sampled.

    Attributes:
        seq_id: the sequence.
        prompt_token_ids: for penalties.
        seed: of this sequence's own random stream; draws depend on the seed and the number of the token, on nothing else.
        allowed_token_ids: that alone may be sampled; None for all.
        logit_bias: values added to the logits, by token id.
        stop_token_ids: ids that are masked until `min_tokens` tokens are out.
        logprobs: number of best log probabilities to return beside the sampled token's; None for no log probabilities.
        logits_processors: called on the host before everything else, in this order, with the tokens that the sequence was given and its
            logits, float32[vocab_size] on the device, which they return changed. They never leave the process.
        grammar: that the sequence's text follows, as llguidance reads it: only tokens that go on with it may be sampled, and those of
            `stop_token_ids` where it may end. The next step of such a sequence is submitted when its token was collected.
        bad_words: token ids that must not follow one another: the last one of each is masked where the sequence has the others.
        logprobs_mode: what `logprobs` are.
        state_row: the sequence's row of the worker's state table, see `StepBatch.state_rows`; it may have been an ended sequence's before.
    """

    seq_id: int
    prompt_token_ids: Sequence[int]
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    state_row: int = -1
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS

    @property
    def is_pure_greedy(self) -> bool:
        """The token is the argmax of the unchanged logits, and nothing else is asked of them, once `min_tokens` tokens are out."""
        return (
            self.temperature == 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.allowed_token_ids is None
            and self.logprobs is None
            and not self.logits_processors
            and self.grammar is None
            and not self.bad_words
        )


@dataclass(frozen=True, slots=True)
class SequencePooling:
    """A pooled request's sequence: how its hidden states are pooled, once `prompt_len` tokens are computed.

    Attributes:
        second_text: position of the token with which the second of two texts begins, for models that tell them apart; 0 for one text, below
            0 where all tokens are of the second.
    """

    pooling: Pooling
    prompt_len: int
    task: PoolingTask = PoolingTask.EMBED
    second_text: int = 0


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Tokens of a prompt whose log probabilities are wanted, as far as one step can give them.

    Attributes:
        first: index, among the sequence's tokens of this step, of the one that the first target follows.
        targets: int64[m], the prompt's tokens that follow that one and the next ones.
        count: of the most probable tokens at each position, beside the target.
    """

    first: int
    targets: Int64Array
    count: int


class EmbeddingKind(StrEnum):
    """What a source of embeddings has: the embeddings themselves, or a picture of which the model makes them."""

    ROWS = "rows"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """Of what embeddings are made that stand in the place of those of tokens.

    Attributes:
        arrays: for ROWS "rows", float32[num_rows, hidden_size]; for IMAGE what the model's own processor makes of a picture, by its names.
        num_rows: how many embeddings come of it.
    """

    kind: EmbeddingKind
    num_rows: int
    arrays: Mapping[str, AnyArray]


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Tokens of a step, one after the other in a sequence, whose embeddings are those of a source and not those of their ids.

    Attributes:
        first: index in the step of the first one.
        count: how many.
        source: its number.
        row: which of the source's embeddings is the first token's.
    """

    first: int
    count: int
    source: int
    row: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """What the worker gets for one step.

    Attributes:
        batch: the scheduler's arrays.
        new_sequences: sampling of sequences that are sampled for the first time in this step.
        finished_seq_ids: sequences whose state the worker forgets.
        pooling: the sequences of this step that belong to pooled requests, by id; they are not sampled.
        scoring: by sequence id, whose prompts' log probabilities are wanted.
        embedded: tokens whose embeddings are given; of sources that came with this step, or with one before and were not dropped since.
        new_sources: by number, sources whose embeddings a worker makes before it computes the step, and keeps.
        dropped_sources: numbers of those that it forgets first; it may not have all of them. A worker forgets all by itself when it goes to
            sleep, and when weights are written.
        positions: int64[3, T], where the tokens of pictures have positions by time, row and column; `batch.positions` says the same of all
            other tokens. None where no token of the step has such.
        adapters: by sequence id, the number of the adapter (`Worker.load_adapter`) that its tokens go through; those of no adapter are left
            out. No more of them than `WorkerConfig.max_loras` in one step.
    """

    batch: StepBatch
    new_sequences: tuple[SequenceSampling, ...] = ()
    finished_seq_ids: tuple[int, ...] = ()
    pooling: Mapping[int, SequencePooling] = field(default_factory=dict)
    scoring: Mapping[int, PromptScoring] = field(default_factory=dict)
    embedded: tuple[EmbeddedTokens, ...] = ()
    new_sources: Mapping[int, EmbeddingSource] = field(default_factory=dict)
    dropped_sources: tuple[int, ...] = ()
    positions: Int64Array | None = None
    adapters: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution unless `SequenceSampling.logprobs_mode` says otherwise.

    Attributes:
        token_ids: the sampled token first, then the best ones in falling order.
        logprobs: float32, one for each of token_ids.
        rank: of the sampled token, 1 for the most probable.
    """

    token_ids: Int64Array
    logprobs: FloatArray
    rank: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of m tokens of a prompt that follow one another, of the model's own distribution.

    Attributes:
        token_ids: int64[m, 1 + count], the prompt's token first, then the most probable ones in falling order.
        logprobs: float32[m, 1 + count], one for each of token_ids.
        ranks: int64[m], of the prompt's tokens, 1 for the most probable.
    """

    token_ids: Int64Array
    logprobs: FloatArray
    ranks: Int64Array


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the worker returns for one step.

    Attributes:
        token_ids: int64[S], one for each of the batch's samples, in order; -1 for a sample that has none.
        logprobs: by index in 0..S, for the samples whose sequence asked for them.
        embeddings: by sequence id, for pooled sequences whose prompt ended in this step: float32[width], with the pooling ALL
            float32[tokens, width]. The width is hidden_size, or for the task CLASSIFY the number of labels.
        failed: by index in 0..S, why a sample has no token. Its sequence ends with an error; the others go on.
        prompt_logprobs: by sequence id, what `StepInput.scoring` asks for.
        drafted: int64[S], what the worker's draft model has guessed for each sample; -1 where it guessed nothing. Empty where it made no
            guess in the step.
        tiers: what became of `StepBatch.tier_moves`, on every rank; None where the step has none.
    """

    token_ids: Int64Array
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    embeddings: Mapping[int, FloatArray] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    drafted: Int64Array = field(default_factory=_no_tokens)
    tiers: TierReport | None = None
