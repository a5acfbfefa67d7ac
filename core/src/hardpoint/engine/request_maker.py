"""How a prompt and its parameters become a request and a command, the same for all clients of an engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.engine.commands import BeamSearch, Embed, Generate, Pause, StartProfile
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.inputs import Prompt, PromptProcessor, RequestArguments, TokenizedPrompt, check_params
from hardpoint.engine.media import Media
from hardpoint.engine.pooling import PoolingModel
from hardpoint.engine.prompt_embeds import PromptEmbeds
from hardpoint.engine.request import BeamRequest, PoolingRequest, Recipient, Request
from hardpoint.engine.sleep import SleepRequest
from hardpoint.interfaces.batch import EmbeddingKind, LogprobsMode
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams
from hardpoint.interfaces.worker import ModelInfo
from hardpoint.models import PoolingDefaults, TokenizerBackend
from hardpoint.sampling import BeamSearchParams, PoolingParams, SamplingParams
from hardpoint.sampling.guidance import Grammars
from hardpoint.sampling.random import stream_key
from hardpoint.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROFILE_VARIABLE = "HARDPOINT_PROFILE_DIR"
"""Environment variable: the folder of profiles, where a call names none."""

_UNSEEDED = 0x6861726470_6F696E74
"""Keeps the seeds of requests without one apart from those that users choose."""

_WORD_LISTS = 8
"""Lists of `bad_words` whose tokens are kept: requests of one caller tend to have the same one."""


class RequestMaker:
    """Makes requests of what callers pass, for one engine; safe to use from any thread.

    Args:
        eos_ids: the model's end-of-text tokens.
        default_sampling_params: for callers that give none.
        pooling: what the model's files say of embeddings and labels.
        media: takes the pictures of prompts.

    Attributes:
        pooling_model: what the model gives for prompts that are pooled.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_ids: frozenset[int],
        default_sampling_params: SamplingParams,
        pooling: PoolingDefaults,
        media: Media,
    ) -> None:
        self.tokenizer = tokenizer
        self.default_sampling_params = default_sampling_params
        self.pooling_model = PoolingModel(model, pooling)
        self.process = PromptProcessor(
            tokenizer,
            model.vocab_size,
            model.max_model_len,
            media,
            embeds=PromptEmbeds(model, enabled=config.enable_prompt_embeds),
            separates=pooling.separates,
        )
        self._config, self._model, self._eos_ids = config, model, eos_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._tokens_of_words = lru_cache(_WORD_LISTS)(partial(_tokens_of_words, self.process))
        self._keys, self._numbers = itertools.count(), itertools.count()
        vocabulary = TokenizerBackend.of(config.model, config.tokenizer, config.load_format, config.trust_remote_code)
        self._grammars = Grammars(vocabulary, model.vocab_size)

    def _check_request(self, request_id: str, priority: int) -> None:
        """Raise InvalidRequest for what cannot name or rank a request."""
        RequestArguments(request_id, priority)
        policy = self._config.scheduling_policy
        if priority and policy != "priority":
            raise InvalidRequest(
                "the engine does not schedule by priority",
                found=f"priority={priority} with scheduling_policy='{policy}'",
                hint="Leave the priority out, or make the engine with scheduling_policy='priority'",
            )

    def _grammar(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> str | None:
        """Return the grammar of structured outputs as text, compiled to see that a text can begin; None without one.

        Raises InvalidSamplingParams, ConfigError.
        """
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise InvalidSamplingParams(
                "structured_outputs need the model's tokenizer", found="an engine without one", hint="Make it with one"
            )
        text = params.structured_outputs.grammar_text()
        self._grammars.check(params.to_sequence_sampling(0, (), 0, 0, self._eos_ids, text, bad_words=bad_words))
        return text

    def next_number(self) -> int:
        """Return a number for the next request, by which it is seeded where it names no seed: requests are numbered as they come."""
        return next(self._numbers)

    def generation(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        recipient: Recipient,
        adapter: str = "",
        number: int | None = None,
    ) -> tuple[Request, Generate]:
        """Return a generation request and the command that queues it; raises InvalidRequest, ConfigError.

        A grammar takes some 10 ms at most, the first one as long as the tokenizer takes, and many words that must not come 0.3 s.

        Args:
            adapter: name of one that is loaded; empty for none.
            number: that `next_number` gave for it; None for the next.
        """
        self._check_request(request_id, priority)
        check_params(params, SamplingParams)
        if not self._model.is_generative:
            raise InvalidRequest("the model has no language-model head", hint="Use embed")
        tokens = self.process(prompt, truncate=params.truncate_prompt_tokens)
        params.check_vocab(self._model.vocab_size)
        if params.prompt_logprobs is not None and any(one.source.kind is EmbeddingKind.ROWS for one in tokens.embedded):
            raise InvalidSamplingParams(
                "embeddings have no log probabilities, as tokens have",
                found="prompt_logprobs with prompt_embeds",
                hint="Leave prompt_logprobs out",
            )
        bad_words = self._bad_words(params)
        grammar = self._grammar(params, bad_words)
        if params.logits_processors and self._config.other_processes:
            raise InvalidSamplingParams(
                "logits_processors are functions of this process, and the model runs in others",
                found=self._config.other_processes,
                hint="Use logit_bias or allowed_token_ids, or an engine with one rank in this process",
            )
        if params.num_sequences > self._config.max_num_seqs:
            raise InvalidSamplingParams(
                f"{params.num_sequences} completions are asked for",
                found=f"the engine runs at most {self._config.max_num_seqs} sequences at a time",
                hint="Lower n or best_of, or raise max_num_seqs",
            )
        seed = unseeded(self._config.seed, self.next_number() if number is None else number)
        command = Generate(
            key=next(self._keys),
            prompt_token_ids=tokens.token_ids,
            sampling=tuple(
                params.to_sequence_sampling(
                    -1,
                    (),
                    fork,
                    seed,
                    self._eos_ids,
                    grammar,
                    bad_words=bad_words,
                    logprobs_mode=self._config.logprobs_mode,
                    vocab_size=self._model.vocab_size,
                )
                for fork in range(params.num_sequences)
            ),
            stop_token_ids=tuple(sorted(params.all_stop_token_ids(self._eos_ids))),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            priority=priority,
            salt=tokens.cache_salt or "",
            embedded=tokens.embedded,
            positions=tokens.positions,
            prompt_logprobs=self._model.vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs,
            prompt_logprobs_start=params.prompt_logprobs_start,
            adapter=adapter,
        )
        request = Request(request_id, command.key, tokens, params, self._detokenizer, self._eos_ids, recipient)
        return request, command

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of the words that must not come, at the beginning of a text and after a space."""
        words = tuple(params.bad_words or ())
        if words and self.tokenizer is None:
            raise InvalidSamplingParams(
                "bad_words need the model's tokenizer", found="an engine without one", hint="Make it with one"
            )
        return self._tokens_of_words(words)

    def beam_search(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: BeamSearchParams,
        priority: int,
        recipient: Recipient,
        adapter: str = "",
    ) -> tuple[BeamRequest, Generate]:
        """Return a beam search and the command that queues it; raises InvalidRequest."""
        self._check_request(request_id, priority)
        check_params(params, BeamSearchParams)
        if not self._model.is_generative:
            raise InvalidRequest("the model has no language-model head", hint="Use embed")
        tokens = self.process(prompt)
        width, candidates = params.beam_width, params.num_candidates(self._eos_ids)
        if width > self._config.max_num_seqs:
            raise InvalidSamplingParams(
                f"{width} beams are asked for",
                found=f"the engine runs at most {self._config.max_num_seqs} sequences at a time",
                hint="Lower beam_width, or raise max_num_seqs",
            )
        if candidates > self._model.vocab_size:
            raise InvalidSamplingParams(
                f"{width} beams need {candidates} candidates each",
                found=f"a vocabulary of {self._model.vocab_size} tokens",
                hint="Lower beam_width",
            )
        mode = self._config.logprobs_mode
        if mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS):
            raise InvalidSamplingParams(
                "beam search needs log probabilities", found=f"an engine with logprobs_mode='{mode}'"
            )
        eos_ids = () if params.ignore_eos else tuple(sorted(self._eos_ids))
        one = SamplingParams(temperature=params.temperature, logprobs=candidates, ignore_eos=True)
        seed = unseeded(self._config.seed, self.next_number())
        command = Generate(
            key=next(self._keys),
            prompt_token_ids=tokens.token_ids,
            sampling=tuple(
                one.to_sequence_sampling(-1, (), fork, seed, (), logprobs_mode=mode) for fork in range(width)
            ),
            max_tokens=params.max_tokens,
            priority=priority,
            salt=tokens.cache_salt or "",
            embedded=tokens.embedded,
            positions=tokens.positions,
            beams=BeamSearch(width, params.length_penalty, eos_ids),
            adapter=adapter,
        )
        return BeamRequest(request_id, command.key, tokens, params, self._detokenizer, recipient), command

    def pooling(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: PoolingParams | None,
        recipient: Recipient,
    ) -> tuple[PoolingRequest, Embed]:
        """Return a request whose hidden states are pooled, and the command that queues it; raises InvalidRequest."""
        RequestArguments(request_id)
        if params is not None:
            check_params(params, PoolingParams)
        plan = self.pooling_model.plan(params)
        tokens = self.process(prompt, reserve=0, truncate=plan.params.truncate_prompt_tokens)
        if tokens.embedded:
            raise InvalidRequest(
                "prompts that are pooled are text", found="a prompt with pictures or embeddings", hint="Give text alone"
            )
        command = Embed(next(self._keys), tokens.token_ids, plan.pooling, plan.task, tokens.second_text)
        finish = partial(self.pooling_model.finish, plan, tokens.token_ids)
        return PoolingRequest(request_id, command.key, tokens, finish, recipient), command

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens; raises InvalidRequest without a tokenizer, TokenOutOfRange."""
        detokenizer = self.detokenizer
        self.process.check_ids(token_ids)
        return detokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def detokenizer(self) -> Detokenizer:
        """Makes text of tokens; raises InvalidRequest without a tokenizer."""
        if self._detokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", hint="Make it with a tokenizer")
        return self._detokenizer


def pause_command(mode: str, drain_timeout: float | None) -> Pause:
    """Return the command of a pause; raises SleepRefused."""
    request = SleepRequest.parse({"level": 0, "mode": mode, "drain_timeout": drain_timeout})
    return Pause(request.mode, request.drain_timeout)


def profile_command(folder: str | None) -> StartProfile:
    """Return the command that begins a profile in a folder, or in that of HARDPOINT_PROFILE_DIR; raises InvalidRequest without one."""
    found = folder or os.environ.get(PROFILE_VARIABLE)
    if not isinstance(found, str):
        raise InvalidRequest(
            "there is no folder for profiles", found=shown(folder), hint=f"Name one, or set {PROFILE_VARIABLE}"
        )
    return StartProfile(str(Path(found).absolute()))


def unseeded(engine_seed: int, number: int) -> int:
    """Return the seed of an engine's `number`-th request that names none: of a stream that no seed given by a caller is in."""
    return stream_key(stream_key(engine_seed ^ _UNSEEDED) + number)


def _tokens_of_words(process: PromptProcessor, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = process.encode(word.lstrip(), add_special_tokens=False)
        spaced = process.encode(" " + word.lstrip(), add_special_tokens=False)
        found[tuple(alone)] = None
        # Where the space is a token of its own, the word's tokens after it are those that it has alone.
        if spaced[1:] != alone:
            found[tuple(spaced)] = None
    return tuple(found)
