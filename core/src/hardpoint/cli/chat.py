"""`hardpoint chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from hardpoint.cli import interrupts
from hardpoint.cli.options import EngineOptions, SamplingOptions, takes
from hardpoint.cli.session import Interrupt, backend_name, interruptible, sampling_params, show_rate, stream
from hardpoint.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM
    from hardpoint.sampling import SamplingParams

_HELP = """\
/system TEXT  begins anew with another system message; without a text, with none
/reset        forgets the conversation
/help         shows this
/exit         ends, as Ctrl-D does
A line that ends with a backslash goes on in the next one, and a message between two lines of \"\"\" has all lines in between.
Ctrl-C stops an answer."""
_QUOTES = '"""'


@takes(sampling=SamplingOptions, engine=EngineOptions)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message that begins the conversation.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens per answer.", show_default="the model's, or 512")
    ] = None,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Talk with an instruction-tuned model; answers appear as they are generated.

    Lines are messages; /help tells of commands and of messages of several lines, /exit or the end of input ends, Ctrl-C stops an answer.
    Earlier turns stay in the prefix cache, so that only what is new is computed. Input may be piped: each line is a message, and only the
    answers go to standard output.
    """
    given = sampling.given(max_tokens=max_tokens)
    with engine.open() as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidRequest(
                f"{llm.info.model} has no chat template, so it cannot chat",
                hint="Use `hardpoint generate --raw`, or an instruction-tuned model",
            )
        _Conversation(llm, sampling_params(llm, given, max_tokens=512), system).run()


class _Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._interactive = sys.stdin.isatty()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> None:
        """Read and answer messages until the end of input or /exit."""
        if self._interactive:
            with suppress(ImportError):  # not everywhere; `input` then knows no arrow keys
                import readline  # noqa: F401
            self._say(f"{self._llm.info.model} on {backend_name(self._llm.info)}. /help tells what can be said here.")
        while (text := self._read_message()) is not None:
            command, _, rest = text.partition(" ")
            if command == "/exit":
                return
            if command == "/reset":
                self._reset()
                self._say("The conversation is forgotten.")
            elif command == "/system":
                self._system = rest.strip() or None
                self._reset()
                self._say("The conversation begins anew.")
            elif command == "/help":
                self._say(_HELP)
            elif text:
                self._turn(text)

    def _read_message(self) -> str | None:
        """Return the next message, of one or more lines; None at the end of input."""
        line = self._read("> ")
        if line is None:
            return None
        lines = []
        if line.strip() == _QUOTES:
            while (line := self._read(". ")) is not None and line.strip() != _QUOTES:
                lines.append(line)
        else:
            while line is not None and line.endswith("\\"):
                lines.append(line[:-1])
                line = self._read(". ")
            lines.append(line or "")
        return "\n".join(lines).strip()

    def _read(self, prompt: str) -> str | None:
        """Return a line, None at the end of input."""
        if not self._interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        while True:
            try:
                return input(prompt)
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                interrupts.forgive()
                self._say(f"\n{_HELP}")

    def _turn(self, text: str) -> None:
        """Answer one message; a message that does not fit is taken back, and told."""
        self._messages.append({"role": "user", "content": text})
        try:
            self._messages.append({"role": "assistant", "content": self._answer()})
        except InvalidRequest as error:
            self._messages.pop()
            if not self._interactive:
                raise
            self._say(f"{error}. /reset starts anew.", "yellow")

    def _answer(self) -> str:
        """Print an answer as it comes, and return it: as far as it came, where Ctrl-C stopped it."""
        llm = self._llm
        pieces: list[str] = []
        num_tokens, num_cached, first_token, last_token = 0, 0, 0.0, 0.0
        prompt = llm.engine.process_chat(self._messages)
        with interruptible() if self._interactive else nullcontext(Interrupt()) as interrupt:
            answer = stream(llm, prompt, self._params)
            for output in answer:
                last_token = time.perf_counter()
                first_token = first_token or last_token
                num_tokens += len(output.outputs[0].token_ids)
                num_cached = output.num_cached_tokens
                pieces.append(output.outputs[0].text)
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
                if interrupt.pressed:
                    answer.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self._interactive:
            speed = show_rate(num_tokens - 1, last_token - first_token)
            cached = f", {num_cached} of {len(prompt.token_ids)} prompt tokens from the cache" if num_cached else ""
            self._say(f"{num_tokens} tokens, {speed}{cached}{', stopped' if interrupt.pressed else ''}")
        return "".join(pieces)

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(text, style))
