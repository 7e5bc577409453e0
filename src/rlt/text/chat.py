"""Chat templates: messages to the prompt text that a checkpoint was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlt.errors import ModelError
from rlt.models.directory import read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
#: The names that the renderer itself sets; a request cannot replace them.
RESERVED_NAMES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

#: A template is a program of the checkpoint: it can fail in any of the ways in which an expression can.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)


class ChatTemplateError(Exception):
    """A template refused the messages or failed on them; the text is for the client."""


class ChatTemplate:
    """One compiled template with the special tokens of its checkpoint; rendering is safe from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`. Raises `ChatTemplateError` when it is no valid template."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is broken: {error}") from error
        #: the names that requests may set: what the template reads and nobody else gives it
        self.options = frozenset(names - RESERVED_NAMES - self._special_tokens.keys())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation; tokenise it without adding special tokens, they are in the text.

        `kwargs` are the template's own options, such as `enable_thinking`; `tools` have the form of the HTTP API.
        Raises `ChatTemplateError`.
        """
        options = dict(kwargs or {})
        if taken := RESERVED_NAMES & options.keys():
            raise ChatTemplateError(f"the template option {min(taken)} cannot be set")
        names = self._special_tokens | options
        try:
            return self._template.render(
                **names, messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=None
            )
        except _FAILURES as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError(
                "the chat template cannot render these messages: they are nested too deep"
            ) from error


def load_chat_template(directory: Path, override: Path | None = None) -> ChatTemplate | None:
    """The chat template of a model directory, or None when there is none.

    `override` (a file) wins, then chat_template.jinja, then tokenizer_config.json. Raises `ModelError`.
    """
    config = _read_object(directory / TOKENIZER_CONFIG_FILE)
    tokens = _special_tokens(_read_object(directory / SPECIAL_TOKENS_FILE)) | _special_tokens(config)
    source: str | None
    if override is not None:
        path, source = override, _read_text(override)
    elif (directory / TEMPLATE_FILE).is_file():
        path = directory / TEMPLATE_FILE
        source = _read_text(path)
    else:
        path = directory / TOKENIZER_CONFIG_FILE
        source = _configured_template(path, config.get("chat_template"))
    if source is None:
        return None
    try:
        return ChatTemplate(source, tokens)
    except ChatTemplateError as error:
        raise ModelError(f"{path}: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes its text on."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates on the Hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _configured_template(path: Path, value: Any) -> str | None:
    """The `chat_template` entry: a text, or a list of named ones of which "default" (or the only one) is taken."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: chat_template must be a text or a list of objects with name and template") from error
    template = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(template, str):
        raise ModelError(f'{path}: chat_template has no entry "default"; set model.chat_template to a file')
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names such as bos_token to their text, as templates use them."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text") from error


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
