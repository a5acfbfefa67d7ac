"""Reasoning: what a model writes for itself between `<think>` and `</think>`, taken out of its answer as it grows."""

from __future__ import annotations

from collections.abc import Mapping

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"

STARTS: Mapping[str, bool] = {"qwen3": False, "deepseek_r1": True}
"""By the parser's name: whether a model reasons from its first word on, also where neither it nor its prompt writes `<think>`."""


def parser_of(template: str | None) -> str | None:
    """Return the name of the parser for a chat template; None where it says nothing of reasoning."""
    if template is None or CLOSE not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def begins_reasoning(name: str, prompt: str) -> bool:
    """Whether what follows a prompt is reasoning from the beginning: the template may have opened it, or closed it."""
    return prompt.rstrip(_SPACE).endswith(OPEN) or (STARTS[name] and not is_closed(prompt))


def is_closed(prompt: str) -> bool:
    """Whether a prompt says itself that there is no reasoning: the template has closed it."""
    return prompt.rstrip(_SPACE).endswith(CLOSE)


class ReasoningParser:
    """Divides one message, given in any pieces, into its reasoning and what follows. Space around the marks belongs to neither.

    Args:
        begins: it is reasoning from the beginning.
    """

    def __init__(self, *, begins: bool) -> None:
        self._held = ""
        self._reasons = begins
        self._is_over = False
        self._is_first = True

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece; return what is certain now to be reasoning, and to be content."""
        self._held += text
        reasoning = ""
        if not self._is_over and not self._reasons:
            rest = self._held.lstrip(_SPACE)
            if rest.startswith(OPEN):
                self._reasons, self._held = True, rest[len(OPEN) :]
            elif OPEN.startswith(rest):
                return "", ""
            else:
                self._is_over, self._is_first = True, False
        if self._reasons:
            reasoning = self._reasoned()
        return reasoning, self._content() if self._is_over else ""

    def finish(self) -> tuple[str, str]:
        """Take the text's end; return what is left."""
        held, self._held = self._held, ""
        if self._reasons:
            # A text that ends before its first word may be an opening mark alone, which is no reasoning.
            return held.strip(_SPACE).removeprefix(OPEN) if self._is_first else held.rstrip(_SPACE), ""
        return "", "" if self._is_first and self._is_over else held

    def _reasoned(self) -> str:
        if self._is_first:
            rest = self._held.lstrip(_SPACE)
            if rest.startswith(OPEN):
                rest = rest[len(OPEN) :].lstrip(_SPACE)
            elif OPEN.startswith(rest):
                return ""
            if not rest:
                self._held = OPEN
                return ""
            self._held, self._is_first = rest, False
        before, mark, after = self._held.partition(CLOSE)
        if mark:
            self._held, self._reasons, self._is_over, self._is_first = after, False, True, True
            return before.rstrip(_SPACE)
        kept = _end_of_certain(before)
        self._held = before[kept:]
        return before[:kept]

    def _content(self) -> str:
        found = self._held.lstrip(_SPACE) if self._is_first else self._held
        self._held, self._is_first = "", self._is_first and not found
        return found


def _end_of_certain(text: str) -> int:
    """Return where the space and the part of the closing mark begin that may be its beginning."""
    for length in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if text.endswith(CLOSE[:length]):
            text = text[:-length]
            break
    return len(text.rstrip(_SPACE))
