"""Tool calls: how models write them, read from a text as it grows, and grammars for those that must be written.

A format is a class of `ToolParser`. It takes a text in any pieces and gives the same content and the same calls; what looks like a call and
is none stays content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hardpoint.engine.inputs import with_plain_content
from hardpoint.sampling import StructuredOutputsParams
from hardpoint.sampling.structured import json_schema
from hardpoint.server.errors import ApiError
from hardpoint.server.protocol import ChatMessage, ChatRequest, ChosenTool

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallPart:
    """What is new of one call.

    Attributes:
        index: of the call in its message.
        name: of the function, in the first part of the call; None in all others.
        arguments: a piece of their JSON.
    """

    index: int
    name: str | None
    arguments: str


class ToolParser(ABC):
    """Finds calls in the text of one message, which it is given piece by piece.

    Attributes:
        marks: without which a text has no calls.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.num_calls = 0
        self._content: list[str] = []
        self._parts: list[CallPart] = []

    def feed(self, text: str) -> tuple[str, list[CallPart]]:
        """Take the next piece of the text; return the content and the parts of calls that are certain now."""
        for character in text:
            self._take(character)
        return self._taken()

    def finish(self) -> tuple[str, list[CallPart]]:
        """Take the text's end; return what is left."""
        self._end()
        return self._taken()

    def _taken(self) -> tuple[str, list[CallPart]]:
        content, parts = "".join(self._content), self._parts
        self._content, self._parts = [], []
        joined: list[CallPart] = []
        for part in parts:
            if joined and joined[-1].index == part.index and part.name is None:
                part = CallPart(part.index, joined[-1].name, joined.pop().arguments + part.arguments)
            joined.append(part)
        return content, joined

    @abstractmethod
    def _take(self, character: str) -> None:
        """Take one character."""

    @abstractmethod
    def _end(self) -> None:
        """Give out what was held back."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Mapping[str, Mapping[str, Any] | None], *, parallel: bool) -> StructuredOutputsParams:
        """Return what a text matches that is a call of one of these functions, or several calls where they may be parallel.

        Args:
            functions: schemas of their arguments by name; None for any object.
        """

    # For subclasses, which report a call while it is parsed

    def _report(self, call: _Call) -> None:
        """Give out what is new of a call that is one beyond doubt."""
        if call.name is None or not call.has_arguments:
            return
        begins = not call.is_reported
        new = call.arguments[call.reported :]
        if begins:
            call.is_reported, call.index = True, self.num_calls
            self.num_calls += 1
        if begins or new:
            self._parts.append(CallPart(call.index, call.name if begins else None, "".join(new)))
        call.reported = len(call.arguments)


class _Call:
    """Reads one object, {"name": ..., "arguments": {...}}, character by character.

    Attributes:
        raw: all characters.
        arguments: characters of the arguments.
        ended: the object is closed.
        failed: it is no JSON, or no call.
        is_reported, reported, index: for `ToolParser._report`.
    """

    def __init__(self) -> None:
        self.raw: list[str] = []
        self.name: str | None = None
        self.arguments: list[str] = []
        self.has_arguments = self.ended = self.failed = self.is_reported = False
        self.reported = self.index = 0
        self._state = self._before
        self._key: list[str] = []
        self._value: list[str] = []
        self._depth = 0
        self._is_name = self._is_arguments = self._in_text = self._escaped = False

    def take(self, character: str) -> None:
        """Read one character of the object, or of the space before it."""
        self.raw.append(character)
        self._state(character)

    def _before(self, character: str) -> None:
        if character == "{":
            self._state = self._between
        elif character not in _SPACE:
            self.failed = True

    def _between(self, character: str) -> None:
        """Before a key, after a comma, or at the end."""
        if character == '"':
            self._key, self._state = [character], self._in_key
        elif character == "}":
            self._close()
        elif character not in _SPACE and character != ",":
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._key.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            key = _loaded("".join(self._key))
            self._is_name, self._is_arguments = key == "name", key in ("arguments", "parameters")
            self._state = self._colon

    def _colon(self, character: str) -> None:
        if character == ":":
            self._state = self._first
        elif character not in _SPACE:
            self.failed = True

    def _first(self, character: str) -> None:
        """At a value's beginning."""
        if character in _SPACE:
            return
        self._value, self._depth, self._in_text = [], 0, False
        if self._is_arguments:
            if character != "{" or self.has_arguments:
                self.failed = True
                return
            self.has_arguments = True
        self._state = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if not self._in_text and self._depth == 0 and self._value and character in ",}" + _SPACE:
            # A number or a word ends where something else begins, which is still to be read.
            self._ends()
            self._state(character)
            return
        (self.arguments if self._is_arguments else self._value).append(character)
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_text = False
                if self._depth == 0:
                    self._ends()
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._ends()

    def _ends(self) -> None:
        self._state = self._between
        if self._is_name:
            name = _loaded("".join(self._value))
            if isinstance(name, str) and name and self.name is None:
                self.name = name
            else:
                self.failed = True

    def _close(self) -> None:
        self.ended = True
        if self.name is None:
            self.failed = True
        elif not self.has_arguments:
            self.has_arguments, self.arguments = True, ["{}"]


def _loaded(text: str) -> object:
    """Return what a JSON text says; None for one that is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Hermes(ToolParser):
    """Content, and calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2, Qwen 2.5 and 3."""

    name = "hermes"
    _OPEN, _CLOSE = marks = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._call: _Call | None = None
        self._is_after = False

    def _take(self, character: str) -> None:
        if self._call is None:
            self._held += character
            self._read_held()
            return
        call = self._call
        call.take(character)
        if call.failed and not call.is_reported:
            self._content.append(self._held + self._OPEN + "".join(call.raw))
            self._call, self._held = None, ""
            return
        self._report(call)
        if call.ended or call.failed:
            self._call, self._held, self._is_after = None, "", True

    def _read_held(self) -> None:
        """Give out what was held back, but for what may be the beginning of a mark, and the space before it."""
        held = self._held
        if self._is_after:
            if self._CLOSE.startswith(held.strip(_SPACE)):
                self._is_after = held.strip(_SPACE) != self._CLOSE
                self._held = held if self._is_after else ""
                return
            self._is_after = False
        space = len(held) - len(held.lstrip(_SPACE))
        if held[space:] == self._OPEN:
            self._call, self._held = _Call(), held[:space]
        elif not self._OPEN.startswith(held[space:]):
            # The held text is no mark; one may begin after its first character.
            start = space + 1
            while not self._OPEN.startswith(held[start:].lstrip(_SPACE)):
                start += 1
            self._content.append(held[:start])
            self._held = held[start:]

    def _end(self) -> None:
        if self._call is None:
            # Space after calls is no content, and neither is the beginning of the mark that ends a call.
            if not self._is_after and not (self.num_calls and not self._held.strip(_SPACE)):
                self._content.append(self._held)
        elif not self._call.is_reported:
            self._content.append(self._held + self._OPEN + "".join(self._call.raw))

    @classmethod
    def grammar(cls, functions: Mapping[str, Mapping[str, Any] | None], *, parallel: bool) -> StructuredOutputsParams:
        return _calls_grammar(functions, f'"{cls._OPEN}\\n"', "arguments", f'"\\n{cls._CLOSE}"', '"\\n"', parallel)


class Llama3Json(ToolParser):
    """A message that is content, or calls alone: `{"name": ..., "parameters": {...}}`, with semicolons between them: Llama 3.1 to 3.3."""

    name = "llama3_json"
    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._call: _Call | None = None
        self._is_content = False

    def _take(self, character: str) -> None:
        if self._is_content:
            self._content.append(character)
            return
        if self._call is None:
            self._held += character
            rest = self._held.strip(_SPACE)
            rest = rest.removeprefix(";" if self.num_calls else self._TAG).lstrip(_SPACE)
            if rest == "{":
                self._call = _Call()
                self._held = self._held[:-1]
            elif rest and not (not self.num_calls and self._TAG.startswith(rest)):
                self._become_content(self._held)
                return
            else:
                return
        self._call.take(character)
        if self._call.failed and not self._call.is_reported:
            self._become_content(self._held + "".join(self._call.raw))
            return
        self._report(self._call)
        if self._call.ended or self._call.failed:
            self._call, self._held = None, ""

    def _become_content(self, text: str) -> None:
        self._is_content, self._call = True, None
        self._content.append(text)

    def _end(self) -> None:
        if self._call is not None and not self._call.is_reported:
            self._content.append(self._held + "".join(self._call.raw))
        elif self._call is None and not self._is_content and not self.num_calls:
            self._content.append(self._held)

    @classmethod
    def grammar(cls, functions: Mapping[str, Mapping[str, Any] | None], *, parallel: bool) -> StructuredOutputsParams:
        return _calls_grammar(functions, "", "parameters", "", '"; "', parallel)


FORMATS: Mapping[str, type[ToolParser]] = {one.name: one for one in (Hermes, Llama3Json)}


def format_of(template: str | None) -> type[ToolParser]:
    """Return the format that a chat template asks its model for; Hermes' where it says nothing of tools."""
    text = template or ""
    if "<tool_call>" not in text and ("<|python_tag|>" in text or '"parameters"' in text):
        return Llama3Json
    return Hermes


def _calls_grammar(
    functions: Mapping[str, Mapping[str, Any] | None],
    begin: str,
    key: str,
    end: str,
    between: str,
    parallel: bool,
) -> StructuredOutputsParams:
    """Return the grammar of calls between marks; each schema is a document of its own, so that its references hold.

    Arguments are an object, also where a schema allows more than that.
    """
    lines = [f"start: call ({between} call)*" if parallel else "start: call"]
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions.items()):
        head = _quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        body = json.dumps(json_schema({**(schema or {}), "type": "object"}))
        lines.append(f'call_{number}: {begin} {head} %json {body} "}}" {end}')
    return StructuredOutputsParams(grammar="\n".join(lines))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SYSTEM = """You may call functions. Here are their signatures, one in each line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def in_template(
    messages: Sequence[ChatMessage], template: str | None, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Return a conversation as a template takes it, and the tools that the template is to describe itself.

    Where it knows no tools, a system message describes them, and calls and their results are texts, in Hermes' way; where it knows no
    role "developer", that is the older "system". Raises InvalidRequest for a content that is no text where it has to be one.
    """
    text = template or ""
    found: list[Mapping[str, Any]] = [_for_template(message) for message in messages]
    if "developer" not in text:
        found = [{**one, "role": "system"} if one["role"] == "developer" else one for one in found]
    if "tools" in text:
        return found, tools
    found = [_as_text(message) for message in found]
    if not tools:
        return found, None
    described = _SYSTEM.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if found and found[0]["role"] == "system":
        first = with_plain_content(found[0])
        return [{**first, "content": f"{first.get('content') or ''}\n\n{described}"}, *found[1:]], None
    return [{"role": "system", "content": described}, *found], None


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the calls in it, or as the result of one, as a text; any other as it is."""
    if message["role"] == "tool":
        content = with_plain_content(message).get("content") or ""
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return message
    content = with_plain_content(message).get("content")
    return {"role": message["role"], "content": "\n".join([*filter(None, [content]), *calls])}


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates expect it: the arguments of calls as mappings, and a text beside them."""
    found = message.model_dump(exclude_unset=True)
    if not message.tool_calls:
        return found
    found["content"] = found.get("content") or ""
    for call in found["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str) and isinstance(parsed := _loaded(arguments), dict):
            call["function"]["arguments"] = parsed
    return found


class ToolChoice:
    """What a request says of tools; raises ApiError.

    Attributes:
        tools: that the model is told of; None where it may call none.
        parser: of the calls in an answer; None where there can be none.
        grammar: of the answer, where there must be a call.
    """

    def __init__(self, body: ChatRequest, template: str | None, named: str) -> None:
        self.tools: list[dict[str, Any]] | None = None
        self.parser: type[ToolParser] | None = None
        self.grammar: StructuredOutputsParams | None = None
        choice, tools = body.tool_choice, body.tools
        if tools is None:
            if choice not in (None, "none"):
                raise ApiError(400, "tool_choice: only with tools", "invalid_value", param="tool_choice")
            return
        functions = {tool.function.name: tool.function.parameters for tool in tools}
        if len(functions) != len(tools) or not tools:
            raise ApiError(400, "tools: at least one, with names of their own", "invalid_value", param="tools")
        if choice == "none":
            return
        self.tools = [tool.model_dump(exclude_none=True) for tool in tools]
        is_known = "tools" in (template or "")
        self.parser = (format_of(template) if named == "auto" else FORMATS[named]) if is_known else Hermes
        parallel = body.parallel_tool_calls is not False
        if isinstance(choice, ChosenTool):
            name = choice.function.name
            if name not in functions:
                raise ApiError(400, f"tool_choice: '{name[:100]}' is not a tool", "invalid_value", param="tool_choice")
            self.grammar = self.parser.grammar({name: functions[name]}, parallel=False)
        elif choice == "required":
            self.grammar = self.parser.grammar(functions, parallel=parallel)
