"""What a text must match, as a request says it, and the same as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.sampling.guidance import llguidance
from hardpoint.validation import Validated, shown

MAX_GRAMMAR_BYTES = 1 << 18
"""Of a grammar as text; a larger one is refused unread."""

MAX_RULES_BYTES, MAX_RULES_LINES = 1 << 16, 250
"""Of `grammar`: llguidance tells an error in a rule once for each rule on the way to it, in a time that grows with their square."""

_WHITESPACE = r"[ ]?|\n[ ]{0,64}"
"""Between the parts of JSON: no more than a line and its indentation. Models given more room may fill it for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(Validated):
    """What a text must match from its first character to its end, by vLLM's names; exactly one is given.

    Attributes:
        json: a JSON schema, as a mapping or as text. The text is JSON that fits it, with at most one space, or a line's end and an
            indentation, between its parts.
        json_object: the text is any JSON object.
        regex: a regular expression of the whole text, in Rust's syntax (Python's without look-around and back-references).
        choice: the texts of which it is one.
        grammar: a context-free grammar in Lark's syntax, as llguidance has it, or in GBNF (`root ::= ...`), of at most 250 lines.
        after: the text is free until this appears, and matches from there on, after one or two ends of line if there are any: "</think>"
            for a model that reasons first. The text cannot end without it.

    Raises:
        InvalidSamplingParams: not one of them, or one that is not of its type. Whether llguidance can compile it is seen when the request
            is made, which raises the same.
    """

    _error = InvalidSamplingParams
    _called = "a parameter of structured outputs"
    _inside = "structured_outputs."

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        given = [f.name for f in fields(self) if f.name != "after" and getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidSamplingParams(
                "structured_outputs need exactly one of json, json_object, regex, choice and grammar",
                found=" and ".join(given) or "none of them",
            )
        if self.choice is not None and not self.choice:
            raise InvalidSamplingParams("structured_outputs.choice must name at least one text", found="an empty list")
        if self.after == "":
            raise InvalidSamplingParams("structured_outputs.after must not be empty", found="''")

    def grammar_text(self) -> str:
        """Return the grammar as llguidance reads it; raises InvalidSamplingParams where it is no text, or too long a one."""
        try:
            text = self._text()
            size = len(text.encode())
        except (TypeError, ValueError, RecursionError) as error:  # no JSON, a lone surrogate
            self._refuse_grammar(str(error))
        if size > MAX_GRAMMAR_BYTES:
            self._refuse_grammar(f"{size} bytes, of which at most {MAX_GRAMMAR_BYTES} are read")
        return text

    def _text(self) -> str:
        if self.json is not None or self.json_object:
            schema = {"type": "object"} if self.json is None else self.json
            body: dict[str, Any] = {"json_schema": json_schema(schema)}
        else:
            body = {"lark_grammar": self._lark()}
        if self.after is None:
            return _dumps({"grammars": [body]})
        head = f"start: before @body\nbefore[suffix={_dumps(self.after)}]: /(?s:.*)/"
        return _dumps({"grammars": [{"name": "main", "lark_grammar": head}, {"name": "body", **body}]})

    def _lark(self) -> str:
        if self.choice is not None:
            return "start: " + " | ".join(_dumps(text) for text in dict.fromkeys(self.choice))
        guidance = llguidance()
        if self.regex is not None:
            (made,) = json.loads(guidance.LLMatcher.grammar_from_regex(self.regex))["grammars"]
            text: str = made["lark_grammar"]
            return text
        assert self.grammar is not None
        size, lines = len(self.grammar.encode()), self.grammar.count("\n") + 1
        if size > MAX_RULES_BYTES or lines > MAX_RULES_LINES:
            raise ValueError(
                f"a grammar of {size} bytes in {lines} lines, of at most {MAX_RULES_BYTES} bytes in {MAX_RULES_LINES} lines"
            )
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            converted: str = any_to_lark(self.grammar)
        except Exception as error:  # whatever its parser trips over
            raise ValueError(f"GBNF that cannot be read: {error}") from error
        return converted

    def _refuse_grammar(self, found: str) -> NoReturn:
        raise InvalidSamplingParams("structured_outputs cannot be used as they are", found=found) from None


def json_schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema as llguidance reads it, with the space that may be between the parts; raises ValueError, TypeError."""
    parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON schema is an object, not {shown(parsed)}")
    return {**parsed, "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
