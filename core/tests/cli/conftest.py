"""The command line in this process, with an engine that echoes, so that what is tested is the command line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

import hardpoint
from hardpoint.cli import main
from hardpoint.engine.info import EngineInfo
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.llm_engine import EngineStats
from hardpoint.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from hardpoint.interfaces.errors import PromptTooLong
from hardpoint.sampling import SamplingParams


@dataclass
class Result:
    code: int
    out: str
    err: str


class EchoTokenizer:
    """A token per character; the ids are code points."""

    vocab_size = 1000
    all_special_ids: ClassVar = [0, 1]
    chat_template: str | None = "a template"


class EchoEngine:
    """Answers with the prompt in capitals, one token per step, up to max_tokens."""

    def __init__(self, llm: EchoLLM) -> None:
        self._llm = llm
        self._running: dict[str, tuple[SamplingParams, list[str]]] = {}
        self.aborted: list[str] = []

    def process(self, prompt: str) -> TokenizedPrompt:
        if len(prompt) > self._llm.info.max_model_len:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens", hint="Shorten it")
        return TokenizedPrompt(prompt, [ord(character) for character in prompt])

    def process_chat(self, messages: Sequence[dict[str, str]]) -> TokenizedPrompt:
        return self.process("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def add_request(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        self._llm.params.append(params)
        self._llm.prompts.append(str(prompt.text))
        self._running[request_id] = params, list(str(prompt.text).upper()[: params.max_tokens])

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        outputs = []
        for request_id, (_, rest) in list(self._running.items()):
            piece = rest.pop(0)
            reason = None if rest else "length"
            completion = CompletionOutput(0, piece, [ord(piece)], finish_reason=reason)
            outputs.append(RequestOutput(request_id, None, [7, 8], [completion], not rest, num_cached_tokens=1))
            if not rest:
                del self._running[request_id]
            self._llm.on_step()
        return outputs

    def abort_request(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)


@dataclass
class EchoLLM:
    settings: dict[str, Any]
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    recommended: SamplingParams = field(default_factory=SamplingParams)
    is_shut_down: bool = False
    tokenizer: Any = field(default_factory=EchoTokenizer)
    made: ClassVar[list[EchoLLM]] = []
    prepare: ClassVar[Callable[[EchoLLM], None] | None] = None

    def __init__(self, **settings: Any) -> None:
        self.settings, self.params, self.prompts, self.tokenizer = settings, [], [], EchoTokenizer()
        self.recommended = SamplingParams()
        self.info = EngineInfo(
            backend="acme",
            device="Acme One",
            simulated=True,
            model=settings["model"],
            architecture="EchoForCausalLM",
            dtype="bfloat16",
            path="fused",
            max_model_len=500,
            block_size=16,
            num_device_blocks=100,
            num_host_blocks=0,
            weight_bytes=1,
            kv_bytes=2,
            load_seconds=0.25,
        )
        self.engine = EchoEngine(self)
        self.on_step: Callable[[], None] = lambda: None
        EchoLLM.made.append(self)
        if EchoLLM.prepare is not None:
            EchoLLM.prepare(self)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.recommended

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=3,
            prefill_tokens=100,
            prefill_seconds=0.5,
            decode_tokens=60,
            decode_seconds=2.0,
            sampled_tokens=61,
            preemptions=0,
            prefix_queries=100,
            prefix_hits=25,
            blocks_used=0,
            blocks_free=100,
            blocks_cached=0,
        )

    def generate(self, prompts: Sequence[Any], params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        many = params if isinstance(params, list) else [params] * len(prompts)
        self.params += many
        outputs = []
        for number, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
            token_ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
            text = "".join(map(chr, token_ids)).upper()[: one.max_tokens]
            self.prompts.append("".join(map(chr, token_ids)))
            logprobs = None if one.logprobs is None else [{ord(c): Logprob(-0.5, 1, c)} for c in text]
            completions = [
                CompletionOutput(index, text, [ord(c) for c in text], -0.5, logprobs, "length")
                for index in range(one.n)
            ]
            metrics = RequestMetrics(10.0, 10.0 + (number + 1) / 10, 20.0)
            outputs.append(RequestOutput(str(number), None, token_ids, completions, True, metrics, 2))
        return outputs

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EchoLLM]]:
    """The engines that commands made, in order."""
    monkeypatch.setattr(hardpoint, "LLM", EchoLLM, raising=False)
    monkeypatch.setattr(EchoLLM, "made", [])
    monkeypatch.setattr(EchoLLM, "prepare", None)
    yield EchoLLM.made
    assert all(llm.is_shut_down for llm in EchoLLM.made)


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[EchoLLM], None]], None]:
    """Change engines when they are made."""
    return lambda change: monkeypatch.setattr(EchoLLM, "prepare", staticmethod(change))


@pytest.fixture
def hp(
    llms: list[EchoLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Run `hardpoint` with the given arguments."""

    def run(*arguments: str, stdin: str = "", terminal: bool = False) -> Result:
        stream = io.StringIO(stdin)
        if terminal:
            stream.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", stream)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run
