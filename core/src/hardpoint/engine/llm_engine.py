"""Requests in, outputs out, one step at a time: the engine that `LLM` drives, and that callers can drive themselves."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardpoint.engine.adapters import AdapterName, LoRARequest, adapter_name
from hardpoint.engine.commands import (
    Abort,
    Command,
    DeclareWeightsValid,
    Event,
    Finish,
    GetStats,
    GetStatus,
    ListAdapters,
    LoadAdapter,
    RegisterParticipant,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    Resume,
    Sleep,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.data_parallel import engine_processes
from hardpoint.engine.info import EngineStats
from hardpoint.engine.inputs import Message, Prompt, TokenizedPrompt
from hardpoint.engine.loops import InlineLoop, Loop
from hardpoint.engine.metrics import Metric, RequestMetricsBook, engine_metrics
from hardpoint.engine.progress import StepProgress
from hardpoint.engine.request import AnyRequest, Output, Recipient, RequestTable
from hardpoint.engine.request_maker import RequestMaker, pause_command, profile_command
from hardpoint.engine.sleep import (
    EngineState,
    SleepParticipant,
    SleepReport,
    SleepRequest,
    SleepStatus,
    Tags,
    WakeReport,
)
from hardpoint.engine.startup import start_engine
from hardpoint.executor.interrupts import AllowedInterrupts, DeferredInterrupts, raise_deferred
from hardpoint.interfaces.errors import EngineDead, InvalidRequest
from hardpoint.sampling import BeamSearchParams, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineStats", "LLMEngine"]

_EXIT_SECONDS = 10.0
"""At most so long does the end of the process wait for a step of another thread."""

_engines: weakref.WeakSet[LLMEngine] = weakref.WeakSet()
_is_exiting = False


class LLMEngine:
    """A loaded model and the requests in progress.

    `add_request` checks a request and queues it; `step` computes one step for all and returns what is new; `abort_request` ends
    requests at any time. Threads that share it are served one after the other, in turn.
    """

    def __init__(self, config: EngineConfig) -> None:
        start = time.perf_counter()
        self.config = config
        self._loop: Loop
        self._maker: RequestMaker
        self._loop, self._maker = start_engine(config, _make_loop)
        self.info = replace(self._loop.info, load_seconds=time.perf_counter() - start)
        self.process = self._maker.process
        self.tokenizer = self._maker.tokenizer
        self.default_sampling_params = self._maker.default_sampling_params
        self.pooling_model = self._maker.pooling_model
        self._lock = self._loop.lock
        self._book = RequestMetricsBook()
        self._requests = RequestTable(self._book.note)
        self._undelivered: list[Output] = []
        self._failures: list[Exception] = []
        self._own = Recipient(lambda make: self._undelivered.append(make()), self._failures.append)
        self._dead = False
        _engines.add(self)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: AdapterName = None,
    ) -> None:
        """Queue a request, whose outputs `step` returns.

        Args:
            request_id: unique among the requests in progress.
            priority: lower values go first; only with scheduling_policy="priority".
            lora_request: an adapter that the request goes through.

        Raises:
            InvalidRequest: the prompt or a parameter is not possible, or the request could never fit; nothing was queued.
            EngineAsleep, WeightsMissing: the engine sleeps, or has no weights, and queues no (more) requests.
        """
        with DeferredInterrupts():
            self._wait(request_id, self.submit_request(request_id, prompt, params, self._own, priority, lora_request))

    def add_pooling_request(
        self, request_id: str, prompt: Prompt | TokenizedPrompt, params: PoolingParams | None = None
    ) -> None:
        """Queue a request whose hidden states are pooled; arguments and errors as for `add_request`."""
        with DeferredInterrupts():
            self._wait(request_id, self.submit_pooling_request(request_id, prompt, params, self._own))

    def submit_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        recipient: Recipient,
        priority: int = 0,
        lora_request: AdapterName = None,
    ) -> Future[None]:
        """Hand a request over, and return what raises if the engine does not take it; it is then to be aborted.

        Args:
            recipient: who is told of its outputs, in the thread that drives the engine then.
        """
        self._check_alive()
        adapter = adapter_name(lora_request, self.load_adapter)
        return self._submit(*self._maker.generation(request_id, prompt, params, priority, recipient, adapter))

    def submit_beam_search(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: BeamSearchParams,
        recipient: Recipient,
        lora_request: AdapterName = None,
    ) -> Future[None]:
        """Hand a beam search over; see `submit_request`."""
        self._check_alive()
        adapter = adapter_name(lora_request, self.load_adapter)
        return self._submit(*self._maker.beam_search(request_id, prompt, params, 0, recipient, adapter))

    def submit_pooling_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: PoolingParams | None,
        recipient: Recipient,
    ) -> Future[None]:
        """Hand a request over whose hidden states are pooled; see `submit_request`."""
        self._check_alive()
        return self._submit(*self._maker.pooling(request_id, prompt, params, recipient))

    def _submit(self, request: AnyRequest, command: Command) -> Future[None]:
        with DeferredInterrupts(), self._lock:
            self._requests.add(request)
            try:
                return self._loop.submit(command)
            except BaseException:
                self._requests.remove(request.request_id)
                raise

    def _wait(self, request_id: str, taken: Future[None]) -> None:
        try:
            with AllowedInterrupts():
                taken.result()
        except BaseException:
            self.abort_request(request_id)
            raise
        finally:
            # The error's traceback has this frame: if the frame kept the error, what its frames hold would stay until a collection.
            del taken
        with DeferredInterrupts(), self._lock:
            self._apply(self._loop.pending())

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Load a LoRA adapter, which requests can name then; does nothing where it is loaded from that folder.

        Raises InvalidAdapter, AdapterInUse.
        """
        self._check_alive()
        self._call(LoadAdapter(adapter.lora_name, adapter.lora_path))

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; raises AdapterNotFound, and AdapterInUse while requests go through it."""
        self._check_alive()
        self._call(UnloadAdapter(name))

    def adapters(self) -> list[str]:
        """Return the names of the LoRA adapters that are loaded."""
        names: list[str] = self._loop.call(ListAdapters())
        return names

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; raises InvalidRequest where there is no tokenizer or an id is not in the vocabulary."""
        return self._maker.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def process_chat(
        self, messages: Sequence[Message], template: str | None = None, add_generation_prompt: bool = True, **how: Any
    ) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; raises InvalidRequest.

        Args:
            how: see `PromptProcessor.chat`.
        """
        return self.process.chat(messages, template, add_generation_prompt, **how)

    def step(self) -> list[Output]:
        """Compute one step and return the outputs of requests that have something new.

        Outputs that came up while the engine went to sleep, or while another thread drove it, are returned first, without a step.

        Raises:
            WorkerError: the worker failed; the requests of this step have ended, all others go on.
            EngineAsleep, WeightsMissing: the engine cannot compute a step in its state; all requests stay as they are.
            EngineDead: the engine was shut down, or (RankFailed) a rank is gone; then all requests have ended.
        """
        _stop_at_exit()
        with DeferredInterrupts(), self._lock:
            self._check_alive()
            if not self._undelivered and not self._failures:
                self._apply(self._loop.events())
            # An interrupt of the step is raised here, so that the next call returns its outputs.
            raise_deferred()
            if self._failures:
                error = self._failures[0]
                self._failures.clear()
                raise error
            outputs = list(self._undelivered)
            self._undelivered.clear()
            return outputs

    def serve(
        self, request_ids: Sequence[str], done: Sized, failures: Sequence[Exception], progress: StepProgress | None
    ) -> None:
        """Compute steps until requests whose recipients fill `done` and `failures` have ended; other threads may do so in between.

        Raises the first failure, InvalidRequest where another thread aborted one, and as `step`.
        """
        shown = ended = 0
        while len(done) < len(request_ids):
            _stop_at_exit()
            with DeferredInterrupts(), self._lock:
                if failures:
                    raise failures[0]
                if len(done) >= len(request_ids):  # of one that is streamed, another thread may have filled in several
                    return
                self._check_alive()
                while ended < len(request_ids) and request_ids[ended] not in self._requests:
                    ended += 1
                if ended == len(request_ids):
                    raise InvalidRequest("the requests were aborted", hint="Another thread ended them")
                self._apply(self._loop.events())
            if progress is not None and len(done) > shown:
                progress.update(len(done) - shown, self.stats())
                shown = len(done)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; no output of them comes any more. Ids that are not in progress are passed over."""
        if not isinstance(request_ids, Iterable):
            raise InvalidRequest(
                "requests are named by their ids",
                found=f"a {type(request_ids).__name__}",
                hint="Give one id or several",
            )
        with DeferredInterrupts(), self._lock:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            keys = {one: key for one in ids if (key := self._requests.remove(one)) is not None}
            # Drop outputs that came while other threads drove the engine. A finished one is that of an earlier request with this id.
            self._undelivered[:] = [one for one in self._undelivered if one.finished or one.request_id not in keys]
            if keys and not self._dead:
                with suppress(EngineDead):
                    self._loop.submit(Abort(tuple(keys.values())))

    def has_unfinished_requests(self) -> bool:
        """There is something to compute, or to return from `step`."""
        return bool(self._requests) or bool(self._undelivered) or bool(self._failures)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are in progress."""
        return len(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self._loop.call(ResetPrefixCache())

    def stats(self) -> EngineStats:
        """Return the counters."""
        stats: EngineStats = self._loop.call(GetStats())
        return stats

    def start_profile(self, folder: str | None = None) -> None:
        """Record by torch's profiler what every rank does, until `stop_profile`.

        Args:
            folder: for the files; None for that of HARDPOINT_PROFILE_DIR.

        Raises InvalidRequest where there is none or it cannot be written to, or a profile is being recorded.
        """
        self._check_alive()
        self._call(profile_command(folder))

    def stop_profile(self) -> list[str]:
        """Write the profile, a file for each rank that Perfetto and chrome://tracing show, and return the files; raises InvalidRequest."""
        self._check_alive()
        files: list[str] = self._call(StopProfile())
        return files

    def get_metrics(self) -> list[Metric]:
        """Return the counters, and the times and sizes of the requests that ended, under the names of the server's `/metrics`."""
        return engine_metrics(self.stats(), self.config.model, self._book)

    def shutdown(self) -> None:
        """End the engine: requests in progress are dropped, memory is given back. Idempotent."""
        with DeferredInterrupts(), self._lock:
            self._dead = True
            self._requests.clear()
            self._undelivered.clear()
            with AllowedInterrupts():
                self._loop.shutdown()

    # Sleep

    def sleep(self, level: int = 1, mode: str = "abort", **arguments: Any) -> SleepReport:
        """Put the engine to sleep; arguments and errors as for `LLM.sleep`, where outputs come as results of `step`."""
        self._check_alive()
        report: SleepReport = self._call(Sleep(SleepRequest.parse({"level": level, "mode": mode, **arguments})))
        return report

    def wake_up(self, tags: str | Sequence[str] | None = None) -> WakeReport:
        """Take memory again, at the same addresses; requests run again once nothing is asleep.

        Args:
            tags: memory to wake ("weights", "kv_cache", ...), and with it the engine's own; None for all.

        Raises:
            UnknownTag, SleepRefused: nothing was done.
            DeviceOutOfMemory, DriverError, BackupCorrupt, ParticipantError and others: the engine is asleep still; try again.
        """
        self._check_alive()
        report: WakeReport = self._call(Wake(Tags.parse({"tags": tags}).tags))
        return report

    def pause(self, mode: str = "keep", drain_timeout: float | None = None) -> SleepReport:
        """Compute no more steps until `resume`; all memory stays. As `sleep` at level 0, but requests in progress are kept."""
        self._check_alive()
        report: SleepReport = self._call(pause_command(mode, drain_timeout))
        return report

    def resume(self) -> None:
        """Compute steps again after a pause, and give up a sleep that waits for requests (SleepRefused where it was called).

        Raises EngineAsleep where memory is asleep: `wake_up` resumes, too.
        """
        self._check_alive()
        self._loop.call(Resume())

    def is_sleeping(self) -> bool:
        """Whether the engine is paused, or any of its memory is asleep."""
        return self.sleep_status().state is EngineState.SLEEPING

    def sleep_status(self) -> SleepStatus:
        """Return state, level, sleeping tags, and whether the weights are valid."""
        status: SleepStatus = self._loop.call(GetStatus())
        return status

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; returns how many were used.

        KV blocks that were computed with the old ones are forgotten, and requests in progress computed again. Tensors before a
        failing one are in place: the engine then refuses to generate until all weights were loaded or updated.

        Raises:
            CorruptWeights: a name or shape that the model does not have.
            MemoryAsleep: the weights are asleep.
        """
        self._check_alive()
        count: int = self._call(UpdateWeights(weights))
        return count

    def reload_weights(self, model: str | None = None) -> int:
        """Load the weights again, from the checkpoint or another one of the same model; returns how many tensors.

        Everything is compared before the first tensor is written; see `update_weights` for what follows a failure after that.

        Raises:
            ModelError, CorruptWeights: there is no such checkpoint, or it does not fit.
            MemoryAsleep: the weights are asleep.
        """
        self._check_alive()
        count: int = self._call(ReloadWeights(model))
        return count

    def declare_weights_valid(self) -> None:
        """Say that the weights are right as they stand, after writing them by ways that the engine does not see.

        Backups of them, and KV blocks computed before, are void. Raises MemoryAsleep while the weights are asleep.
        """
        self._check_alive()
        self._call(DeclareWeightsValid())

    def register_participant(self, participant: SleepParticipant) -> None:
        """Let something take part in sleep and wake; raises ConfigError when its name is taken."""
        self._loop.call(RegisterParticipant(participant))

    def _call(self, command: Command) -> Reply:
        """Have a command done, and tell recipients what came up by it: requests that it ended, or the engine's end."""
        _stop_at_exit()
        with DeferredInterrupts(), self._lock:
            try:
                return self._loop.call(command)
            finally:
                self._apply(self._loop.pending())

    def _apply(self, events: Iterable[Event]) -> None:
        stopped: list[int] = []
        for event in events:
            stopped += self._requests.apply(event)
        if stopped:
            # Not called: the answer to `Finish` says nothing, and a loop in another thread or process may be in the middle of a step.
            self._loop.submit(Finish(tuple(stopped)))

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead("the engine was shut down", hint="Make a new one")


def _stop_at_exit() -> None:
    """Go no further in a daemon thread when the process ends: the interpreter ends it, which in torch's code would abort the process."""
    if _is_exiting and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


@atexit.register
def _let_steps_end() -> None:
    global _is_exiting
    _is_exiting = True
    for engine in list(_engines):
        engine._lock.wait_until_free(_EXIT_SECONDS)


def _make_loop(config: EngineConfig) -> Loop:
    return engine_processes(config) if config.other_engines else InlineLoop(config)
