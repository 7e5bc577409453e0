"""Tool calls in an answer: found in a text that comes in pieces, in the forms that chat templates teach.

json: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
xml:  `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, values as plain text
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from rlt.text.chat import ChatTemplate, ChatTemplateError
from rlt.text.schema import typed_json
from rlt.text.tags import CALL, CALL_END, held_chars

CallStyle = Literal["json", "xml"]
#: JSON schemas of the parameters of each tool, by its name.
ToolSchemas = Mapping[str, Mapping[str, Any]]

_SPACE = " \t\r\n"
#: No mark of a call is longer.
_MAX_MARK_CHARS = 300
_XML_CALL = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>(.*?)</parameter>", re.DOTALL)

#: By style and by whether the text is inside what an end tag does not end: a JSON string, a parameter's value.
_MARKS = {
    ("json", False): re.compile(f'"|{CALL_END}'),
    ("json", True): re.compile(r'\\[^\n]|"|\n'),
    ("xml", False): re.compile("<parameter=[^<>\n]{1,256}>|" + CALL_END),
    ("xml", True): re.compile("</parameter>"),
}
_PROBE_NAME = "probe_of_tools"
_PROBE_USER = {"role": "user", "content": "Hi"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_PROBE_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"key": "x"}}}],
}


class ToolsError(Exception):
    """Tools cannot be used with this template; the text is for the client."""


class ToolCall(NamedTuple):
    name: str
    #: a JSON object
    arguments: str


class Calls(NamedTuple):
    """New text outside of calls, and the calls that were completed."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def call_style(template: ChatTemplate, options: Mapping[str, Any]) -> CallStyle:
    """The form of calls that a template teaches with these options, found by showing it a tool.

    Raises `ToolsError` when it does not show tools to the model, or shows a form that is not known here.
    """
    try:
        shown = template.render([_PROBE_USER], kwargs=options, tools=[_PROBE_TOOL])
    except ChatTemplateError as error:
        raise ToolsError(f"the model's chat template fails on tools: {error}") from error
    if _PROBE_NAME not in shown:
        raise ToolsError("the model's chat template does not show tools to the model")
    if CALL not in shown:
        # It teaches no form in words, but may show one where it writes an earlier call.
        try:
            shown = template.render([_PROBE_USER, _PROBE_CALL], kwargs=options, tools=[_PROBE_TOOL])
        except ChatTemplateError:
            shown = ""
    if CALL not in shown:
        raise ToolsError("the model's chat template writes calls in a form that is not parsed here")
    return "xml" if "<function=" in shown else "json"


class CallParser:
    """Takes the calls out of one text, whatever pieces it comes in.

    Text that cannot be part of a call leaves at once; a call is held until its end tag. What is no complete call of a
    known tool stays in the text as it was written. White space around calls is left out, except between text before
    and text after. `one` keeps the first call only and leaves out the others.
    """

    def __init__(self, style: CallStyle, tools: ToolSchemas, *, one: bool = False) -> None:
        self._style = style
        self._tools = tools
        self._one = one
        self._calls = 0
        self._has_content = False
        #: outside of a call: white space and the beginning of a tag; inside: all since the white space before the tag
        self._held = ""
        #: inside: where the call's body begins in `_held`, else 0
        self._body = 0
        #: inside: how far `_held` is read, and whether an end tag there would not be one
        self._read = 0
        self._quoted = False

    @property
    def called(self) -> bool:
        """Whether a call was completed."""
        return self._calls > 0

    def feed(self, text: str, *, final: bool = False) -> Calls:
        """Take the next piece; with `final` nothing is held back any more."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._body and not self._enter(content, final):
                break
            end = self._find_end()
            if end < 0:
                break
            self._leave(end, content, calls)
        if final:
            self._give_back(content)
        return Calls("".join(content), tuple(calls))

    def _enter(self, content: list[str], final: bool) -> bool:
        """Pass on the text before the next call; False when there is none yet."""
        text = self._held
        start = text.find(CALL)
        end = start if start >= 0 else len(text) - (0 if final else held_chars(text, CALL, ""))
        keep = len(text[:end].rstrip(_SPACE))
        self._emit(text[:keep], content)
        self._held = text[keep:]
        if start < 0:
            return False
        self._body = self._read = start + len(CALL) - keep
        self._quoted = False
        return True

    def _emit(self, text: str, content: list[str]) -> None:
        if text and self._calls and not self._has_content:
            text = text.lstrip(_SPACE)
        if text:
            self._has_content = True
            content.append(text)

    def _find_end(self) -> int:
        """Where the end tag of the call begins; -1 when it has not come."""
        text = self._held
        while match := _MARKS[self._style, self._quoted].search(text, self._read):
            if match[0] == CALL_END:
                return match.start()
            self._read = match.end()
            if match[0][0] != "\\":
                # A line break ends a broken JSON string, so that it does not hide the end of its call.
                self._quoted = not self._quoted
        # A mark may be cut in two: it begins with the last "<" or, in a JSON string, with a "\" at the end.
        if self._style == "json" and self._quoted:
            self._read = len(text) - text.endswith("\\", self._read)
        else:
            cut = text.rfind("<", self._read)
            self._read = cut if cut >= len(text) - _MAX_MARK_CHARS and cut >= 0 else len(text)
        return -1

    def _leave(self, end: int, content: list[str], calls: list[ToolCall]) -> None:
        """Turn what was held, up to the end tag at `end`, into a call or back into text."""
        after = end + len(CALL_END)
        call = parse_call(self._held[self._body : end], self._style, self._tools)
        if call is None:
            self._has_content = True
            content.append(self._held[:after])
        else:
            if not (self._one and self._calls):
                calls.append(call)
            self._calls += 1
        self._held, self._body = self._held[after:], 0

    def _give_back(self, content: list[str]) -> None:
        """Pass on what is held at the end, but not the white space behind a call."""
        if self._held.strip(_SPACE) or not self._calls:
            content.append(self._held)
        self._held, self._body = "", 0


def parse_call(body: str, style: CallStyle, tools: ToolSchemas) -> ToolCall | None:
    """The call between two tags; None when it is not complete and well-formed, or names no tool."""
    call = _parse_json(body) if style == "json" else _parse_xml(body, tools)
    return call if call is not None and call.name in tools else None


def _parse_json(body: str) -> ToolCall | None:
    try:
        call = msgspec.json.decode(body, type=_JsonCall)
        # The arguments stay as the model wrote them; they only have to be an object.
        msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return ToolCall(call.name, bytes(call.arguments).decode())


def _parse_xml(body: str, tools: ToolSchemas) -> ToolCall | None:
    call = _XML_CALL.fullmatch(body)
    if call is None:
        return None
    name, rest = call[1].strip(), call[2]
    schema = tools.get(name, {})
    arguments: dict[str, msgspec.Raw] = {}
    position = 0
    while parameter := _XML_PARAMETER.match(rest, position):
        key = parameter[1].strip()
        if key in arguments:
            return None
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = msgspec.Raw(typed_json(value, schema, key).encode())
        position = parameter.end()
    if rest[position:].strip():
        return None
    return ToolCall(name, msgspec.json.encode(arguments).decode())
