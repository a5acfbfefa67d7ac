"""What operators watch, for Prometheus: names as vLLM's dashboards have them where there is one, under the prefix `hardpoint`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hardpoint.engine.info import EngineStats
from hardpoint.engine.metrics import (
    COUNTERS,
    FIRST_TOKEN_SECONDS,
    GAUGES,
    LABELLED_GAUGES,
    PREFIX,
    TOKENS,
    WHOLE_SECONDS,
)
from hardpoint.engine.outputs import RequestOutput
from hardpoint.engine.sleep import SleepReport, SleepStatus, WakeReport
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import EngineDead, RequestTimeout, WorkerError

if TYPE_CHECKING:
    from hardpoint.server.tracing import Tracing

_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_SLEEP = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PLACES = ("allocated", "device", *(tier.value for tier in SleepTier))
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Metrics:
    """The server's metrics, and those of each model by the label `model_name`.

    Args:
        tracing: gets what is counted of single requests, sleeps and wakes, too.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.registry = CollectorRegistry()
        self._engines = _Engines()
        self.registry.register(self._engines)
        label = ["model_name"]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, [*label, *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, [*label, *labels], registry=self.registry, buckets=buckets)

        self.finished = counter("request_success", "Requests that ended, by reason", "finished_reason")
        self.refused = counter("requests_refused", "Requests refused because too many were in progress")
        self.deaths = counter("engine_deaths", "Engines that died")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_SECONDS)
        self.queue = histogram(
            "request_queue_time_seconds", "Arrival to the first step of the prompt", FIRST_TOKEN_SECONDS
        )
        self.inter_token = _Gaps(f"{PREFIX}inter_token_latency_seconds", "Between two outputs of a stream")
        self.registry.register(self.inter_token)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to end", WHOLE_SECONDS)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.output_tokens = histogram("request_generation_tokens", "Tokens that a request generated", TOKENS)
        self.changes = histogram("sleep_operation_seconds", "Sleeps and wakes", _SLEEP, "operation")
        self.phases = counter("sleep_phase_seconds", "Time of sleeps and wakes, by phase", "operation", "phase")
        self.bytes = counter("sleep_bytes", "Bytes of sleeps and wakes, by what became of them", "operation", "kind")
        self.change_failures = counter("sleep_failures", "Sleeps and wakes that failed", "operation", "error")
        self.rate = Gauge(
            "hardpoint:sleep_bytes_per_second", "Of the last copy", [*label, "operation"], registry=self.registry
        )
        self.residual = Gauge(
            "hardpoint:sleep_residual_bytes", "In use while asleep", [*label, "participant"], registry=self.registry
        )
        self.sleep_state = Gauge(
            "hardpoint:engine_sleep_state", "1 for the present state", [*label, "sleep_state"], registry=self.registry
        )

        self.memory = Gauge(
            "hardpoint:memory_bytes",
            "An engine's memory by tag: allocated, and where its bytes or copies of them are",
            [*label, "tag", "place"],
            registry=self.registry,
        )

    def of(self, model_name: str) -> ModelMetrics:
        """Return the metrics of one model."""
        return ModelMetrics(self, model_name)

    def set_engine(self, model_name: str, stats: EngineStats | None) -> None:
        """Take an engine's counters, as `/metrics` shows them next; None where it has none now."""
        self._engines.stats[model_name] = stats


class ModelMetrics:
    """What is counted of one model, with its label filled in once."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.name, self.tracing, self._metrics = name, metrics.tracing, metrics
        self.refused = metrics.refused.labels(name)
        self.deaths = metrics.deaths.labels(name)
        self.first_token = metrics.first_token.labels(name)
        self.queue = metrics.queue.labels(name)
        self.inter_token = metrics.inter_token.labels(name)
        self.whole = metrics.whole.labels(name)
        self.prompt_tokens = metrics.prompt_tokens.labels(name)
        self.output_tokens = metrics.output_tokens.labels(name)

    def request(self, prompt_tokens: int, num_completions: int) -> RequestWatch:
        """Return what watches one request."""
        self.prompt_tokens.observe(prompt_tokens)
        return RequestWatch(self, prompt_tokens, num_completions)

    def embedded(self, prompt_tokens: int) -> None:
        """Note an embedding."""
        if self.tracing is not None:
            self.tracing.note_generation(self.name, prompt_tokens, 0)

    def operation(self, kind: str) -> AbstractContextManager[None]:
        """Return the context of a sleep or wake, which `slept` or `woke` ends."""
        return nullcontext() if self.tracing is None else self.tracing.operation(self.name, kind)

    def finished(self, reason: str) -> None:
        """Count a request that ended."""
        self._metrics.finished.labels(self.name, reason).inc()

    def state(self, status: SleepStatus) -> None:
        """Take the state of the engine."""
        now = "awake" if not status.asleep else "weights_offloaded" if status.weights_valid else "discard_all"
        for state in _SLEEP_STATES:
            self._metrics.sleep_state.labels(self.name, state).set(state == now)
        for tag, memory in status.memory.items():
            copies = {tier.value: size for tier, size in memory.copies.items()}
            sizes = {"allocated": memory.allocated, "device": memory.mapped, **copies}
            for place in _PLACES:
                self._metrics.memory.labels(self.name, tag, place).set(sizes.get(place, 0))

    def slept(self, report: SleepReport) -> None:
        """Count a sleep."""
        self._changed("sleep", report)
        for participant, size in report.residual.items():
            self._metrics.residual.labels(self.name, participant).set(size)

    def woke(self, report: WakeReport) -> None:
        """Count a wake."""
        self._changed("wake", report)

    def failed(self, operation: str, error: Exception) -> None:
        """Count a sleep or wake that raised."""
        self._metrics.change_failures.labels(self.name, operation, type(error).__name__).inc()

    def _changed(self, operation: str, report: SleepReport | WakeReport) -> None:
        metrics, seconds, memory = self._metrics, report.seconds, report.memory
        if self.tracing is not None:
            self.tracing.note_report(report)
        metrics.changes.labels(self.name, operation).observe(seconds)
        if memory is None:
            return
        for kind in ("preserved", "discarded", "skipped", "unmapped"):
            metrics.bytes.labels(self.name, operation, kind).inc(getattr(memory, kind))
        for phase, spent in memory.seconds.items():
            metrics.phases.labels(self.name, operation, phase).inc(spent)
        if memory.preserved and seconds > 0:
            metrics.rate.labels(self.name, operation).set(memory.preserved / seconds)


class _Gaps:
    """A histogram of what is observed for each token, by one thread: prometheus_client's own takes 1 µs for that, and this one 0.2."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._models: dict[str, _GapsOfModel] = {}

    def labels(self, model_name: str) -> _GapsOfModel:
        """Return the counts of one model."""
        return self._models.setdefault(model_name, _GapsOfModel())

    def collect(self) -> Iterator[Metric]:
        """Yield it as Prometheus's client has it."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in _INTER_TOKEN), "+Inf"]
        for name, found in self._models.items():
            family.add_metric([name], list(zip(bounds, accumulate(found.counts), strict=True)), found.total)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Return its name and type."""
        return [HistogramMetricFamily(self._name, self._text)]


class _GapsOfModel:
    """How many values lie between the bounds, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_INTER_TOKEN) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(_INTER_TOKEN, value)] += 1
        self.total += value


class RequestWatch:
    """The times of one request, which lasts as long as its context.

    Attributes:
        is_taken: the engine has the request; what fails before is a refusal.
    """

    __slots__ = (
        *("_first", "_last", "_metrics", "_num_completions", "_output", "_prompt_tokens", "_start", "_tokens"),
        "is_taken",
    )

    def __init__(self, metrics: ModelMetrics, prompt_tokens: int, num_completions: int) -> None:
        self._metrics, self._prompt_tokens, self._num_completions = metrics, prompt_tokens, num_completions
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: float | None = None
        self._output: RequestOutput | None = None
        self._tokens = 0
        self.is_taken = False

    def __enter__(self) -> RequestWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracing, output = self._metrics.tracing, self._output
        # A client that leaves cancels what waits for outputs, or reads no more of them; other errors are of the engine.
        is_given_up = error is None or not isinstance(error, Exception) or isinstance(error, RequestTimeout)
        is_lost = self.is_taken and isinstance(error, WorkerError | EngineDead)
        if (is_given_up or is_lost) and (output is None or not output.finished):
            none = [None] * self._num_completions
            for reason in none if output is None else [one.finish_reason for one in output.outputs]:
                self._metrics.finished(reason or ("error" if is_lost else "abort"))
        if tracing is None:
            return
        tracing.note_generation(
            self._metrics.name,
            self._prompt_tokens,
            self._tokens,
            [] if output is None else [one.finish_reason for one in output.outputs if one.finish_reason is not None],
            None if output is None or output.metrics is None else output.metrics.queue_seconds,
            self._first,
            error if isinstance(error, Exception) else None,
        )

    def output(self, output: RequestOutput) -> None:
        """Take the next output, of deltas or the only one."""
        now, metrics = time.perf_counter(), self._metrics
        for one in output.outputs:
            self._tokens += len(one.token_ids)
        if self._last is not None:
            metrics.inter_token.observe(now - self._last)
        # A request that was ended before its first token has no time to first token.
        elif (times := output.metrics) is not None and times.first_token_time is not None:
            self._first = (times.first_token_time if output.finished else now) - self._start
            metrics.first_token.observe(self._first)
            if times.queue_seconds is not None:
                metrics.queue.observe(times.queue_seconds)
        self._last, self._output = now, output
        if output.finished:
            metrics.whole.observe(now - self._start)
            metrics.output_tokens.observe(self._tokens)
            for completion in output.outputs:
                metrics.finished(completion.finish_reason or "none")


class _Engines:
    """The counters that engines keep themselves, as they were last asked for."""

    def __init__(self) -> None:
        self.stats: dict[str, EngineStats | None] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield them as Prometheus's client has them."""
        known = {name: stats for name, stats in self.stats.items() if stats is not None}
        for name, text, value in COUNTERS:
            yield _filled(CounterMetricFamily(f"{PREFIX}{name}", text, labels=["model_name"]), known, value)
        for name, text, value in GAUGES:
            yield _filled(GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["model_name"]), known, value)
        for name, text, labels, values in LABELLED_GAUGES:
            family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["model_name", *labels])
            for model, stats in known.items():
                for of_labels, one in values(stats):
                    family.add_metric([model, *of_labels], one)
            yield family

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is is known only when it is collected."""
        return []


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily,
    known: dict[str, EngineStats],
    value: Callable[[EngineStats], float],
) -> Metric:
    for model, stats in known.items():
        family.add_metric([model], value(stats))
    return family
