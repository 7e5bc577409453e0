"""The configuration tree, read from TOML, `--set` overrides and Python dicts, and checked as a whole.

Every problem is collected and reported at once, with the file's line and the nearest valid key. A key exists here
only when it does something.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from rlt.depth.table import MAX_THRESHOLD, RULES
from rlt.errors import ConfigError
from rlt.support import refusals

LAYOUTS = r"last_exited|last_exited_copy|shared|last_step|cyclic:[1-9]\d{0,3}"

#: How a hashed access key begins; 64 hex digits follow.
KEY_HASH = "sha256:"


def _at_least(low: float, high: float | None = None) -> dict[str, Any]:
    return {"low": low, "high": high}


def _entries(pattern: str, words: str) -> dict[str, Any]:
    """For a list of texts: what each entry must match, and how an error says it."""
    return {"entries": (pattern, words)}


def hash_key(key: str) -> str:
    """An access key as configurations keep it, `sha256:<hex>`; one that is hashed already stays as it is.

    A plain hash is enough for keys of random characters, which nobody can guess.
    """
    return key if key.startswith(KEY_HASH) else KEY_HASH + hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = field(default=8000, metadata=_at_least(0, 65535))
    #: a Unix socket to listen on instead of host and port
    uds: str | None = field(default=None, metadata={"pattern": r"[^\0]+"})
    #: PEM files; both or neither
    tls_cert: str | None = None
    tls_key: str | None = None
    #: keys of which a request must bear one, plain or hashed; only their hashes are kept. Empty: none is asked for
    api_keys: tuple[str, ...] = field(
        default=(),
        metadata=_entries(
            rf"{KEY_HASH}[0-9a-f]{{64}}|(?!{KEY_HASH})[!-~]+",
            f"a key of visible ASCII characters, or {KEY_HASH} and the 64 hex digits of its hash",
        ),
    )
    #: pages of these origins may call from a browser; "*": of any
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=_entries(
            r"\*|[a-z][a-z0-9+.-]*://[^\s/A-Z]+",
            '"*" or an origin in lower case and without a path, e.g. https://a.org',
        ),
    )
    #: names, without a port, that a request's Host header may have; empty: any
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=_entries(r"[^\s/:A-Z]+|\[[0-9a-f:.]+\]", "a name in lower case or an address, without a port"),
    )
    max_body_bytes: int = field(default=4 << 20, metadata=_at_least(1024))
    #: requests accepted and not finished; more are answered with 429
    max_queue: int = field(default=1024, metadata=_at_least(1))
    #: from a request's arrival to the end of its answer; None: no limit
    request_timeout_s: float | None = field(default=None, metadata=_at_least(0.001))
    drain_timeout_s: float = field(default=30.0, metadata=_at_least(0))

    def __post_init__(self) -> None:
        object.__setattr__(self, "api_keys", tuple(map(hash_key, self.api_keys)))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    #: a built-in model's name, a directory, or a Hub id
    path: str = "tiny-ouro"
    served_name: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    revision: str | None = None
    max_model_len: int | None = field(default=None, metadata=_at_least(2))
    #: a file with a Jinja chat template that replaces the checkpoint's
    chat_template: str | None = None
    #: Huginn: what a token's state is before its first loop; "seeded" follows from the request's seed and the position
    initial_state: Literal["zero", "seeded"] = "zero"
    #: Huginn: an output token starts from the state that the token before it left with
    warm_start: bool = False
    #: the template's option for requests that do not set it; None: as the template has it
    enable_thinking: bool | None = None
    #: which answers begin inside their reasoning: see `rlt.text.reasoning`
    reasoning: Literal["auto", "always", "tagged", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    #: "cpu", "cuda", "cuda:1"; None takes the first GPU, or the CPU where there is none
    device: str | None = None
    max_seqs: int = field(default=64, metadata=_at_least(1, 4096))
    #: rows of one tick (decode rows first, prompt rows fill the rest)
    max_tick_tokens: int = field(default=512, metadata=_at_least(1))
    #: prompt tokens of one chunk
    prefill_chunk: int = field(default=256, metadata=_at_least(1))
    #: start a prompt's next chunk while earlier ones are still in their loops; None: where the layout allows it
    wavefront: bool | None = None
    #: prompt and decode rows share ticks; false runs prompt ticks and decode ticks apart, prompts first
    mixed: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    #: requests that arrived later and may be admitted before a waiting one; then nobody passes it any more
    max_bypass: int = field(default=64, metadata=_at_least(0))
    #: suspend requests to host memory when pages run out; false admits only what is sure to fit
    preemption: bool = True
    #: submit tick N + 1 before the results of tick N are read; None: on a GPU only
    async_scheduling: bool | None = None
    #: attention back end: see `rlt.attention.backends`
    attention: Literal["auto", "torch", "triton"] = "auto"
    #: what computes the layers' norms, activations and products: see `rlt.models.ops`
    kernels: Literal["auto", "torch", "triton"] = "auto"
    #: CPU threads of the engine; None takes all cores but one
    cpu_threads: int | None = field(default=None, metadata=_at_least(1, 1024))


@dataclass(frozen=True, slots=True)
class KvConfig:
    #: last_exited, last_exited_copy, shared, last_step or cyclic:<k>
    layout: str = field(default="last_exited", metadata={"pattern": LAYOUTS})
    page_size: int = field(default=16, metadata=_at_least(1, 1024))
    #: size of the cache: in pages, or in bytes, or as a share of the free memory
    pages: int | None = field(default=None, metadata=_at_least(1))
    bytes: int | None = field(default=None, metadata=_at_least(1))
    memory_fraction: float | None = field(default=None, metadata=_at_least(0.01, 1.0))
    #: share of the pages that admission leaves free for the growth of running requests
    watermark: float = field(default=0.01, metadata=_at_least(0.0, 0.5))
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class ExitConfig:
    #: None: the family's
    rule: str | None = field(default=None, metadata={"choices": tuple(RULES)})
    min_loops: int = field(default=1, metadata=_at_least(1))
    #: None: the checkpoint's number of loops
    max_loops: int | None = field(default=None, metadata=_at_least(1))
    #: what the rule compares with; None: the checkpoint's for a gate, else the rule's own default
    threshold: float | None = field(default=None, metadata=_at_least(0, MAX_THRESHOLD))
    #: rules that need coda and head look at a token after `min_loops` loops and every so many loops from there
    check_interval: int = field(default=1, metadata=_at_least(1, 10_000))
    #: rule = "trace": a JSON file {"depths": [[loops of each output token], ...]}, requests take the rows in turn
    trace_file: str | None = None


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    kv: KvConfig = KvConfig()
    exit: ExitConfig = ExitConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Config)}


def load_config(
    path: Path | None = None,
    *,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    assignments: typing.Sequence[str] = (),
) -> Config:
    """Read and check a configuration.

    `path` is a TOML file; `overrides` is a nested dict of the same shape; `assignments` are `section.key=value`
    strings whose values are TOML literals (a bare word is a string). Later sources win. Raises `ConfigError` with
    every problem found.
    """
    problems: list[str] = []
    sources: list[tuple[Mapping[str, Any], str, str]] = []
    if path is not None:
        sources.append((*_read_toml(path), str(path)))
    if overrides is not None:
        sources.append((overrides, "", "config"))
    for text in assignments:
        assignment = _parse_assignment(text, problems)
        if assignment is not None:
            sources.append((assignment, "", f"--set {text}"))
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for tree, toml_text, origin in sources:
        _merge(tree, toml_text, origin, values, problems)
    if problems:
        raise ConfigError(problems)
    config = Config(**{name: cls(**values[name]) for name, cls in SECTIONS.items()})
    _check_together(config, problems)
    if problems:
        raise ConfigError(problems)
    return config


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text), text
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: is not valid TOML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: is nested too deeply"]) from error


def _parse_assignment(text: str, problems: list[str]) -> dict[str, Any] | None:
    if len(text.splitlines()) > 1:
        problems.append(f"--set {text!r}: must be one line; give --set once for each key")
        return None
    key, equals, literal = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name:
        problems.append(f"--set {text}: expected section.key=value")
        return None
    try:
        value = tomllib.loads(f"value = {literal}")["value"]
    except tomllib.TOMLDecodeError:
        value = literal.strip()
    except RecursionError:
        problems.append(f"--set {section}.{name}: is nested too deeply")
        return None
    return {section: {name: value}}


def _merge(
    tree: Mapping[str, Any], toml_text: str, origin: str, values: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    for section, entries in tree.items():
        cls = SECTIONS.get(section)
        where = _where(origin, toml_text, section, None)
        if cls is None:
            problems.append(f"{where}: unknown section [{section}]{_nearest(section, SECTIONS)}")
            continue
        if not isinstance(entries, Mapping):
            problems.append(f"{where}: [{section}] must be a table")
            continue
        fields = {f.name: f for f in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        for name, value in entries.items():
            where = _where(origin, toml_text, section, name)
            if name not in fields:
                problems.append(f"{where}: unknown key {section}.{name}{_nearest(name, fields)}")
                continue
            problem = _check_value(value, hints[name], fields[name].metadata)
            if problem:
                problems.append(f"{where}: {section}.{name} {problem}")
                continue
            values[section][name] = _converted(value, hints[name])


def _converted(value: Any, hint: Any) -> Any:
    """A checked value as the field has it: TOML has no tuples, and writes whole numbers without a point."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if hint in (float, float | None) and value is not None else value


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _where(origin: str, toml_text: str, section: str, key: str | None) -> str:
    """`file:line` of a key, found by reading the text, since tomllib keeps no positions."""
    if not toml_text:
        return origin
    current = ""
    for number, line in enumerate(toml_text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        if header:
            current = header.group(1).strip("\"'")
            if key is None and current == section:
                return f"{origin}:{number}"
            continue
        name = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if name is None:
            continue
        full = name.group(1).replace('"', "").replace("'", "")
        path = f"{current}.{full}" if current else full
        if path == f"{section}.{key}" or (key is None and path.split(".")[0] == section) or path == section:
            return f"{origin}:{number}"
    return origin


def _check_value(value: Any, hint: Any, bounds: Mapping[str, Any]) -> str | None:
    """Say what is wrong with `value` for a field of type `hint`, or None."""
    if "entries" in bounds:
        return _check_entries(value, *bounds["entries"])
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if typing.get_origin(option) is Literal or "choices" in bounds:
            choices = bounds.get("choices") or typing.get_args(option)
            return None if value in choices else f"must be one of {', '.join(map(repr, choices))}, got {value!r}"
        if option is type(None):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        accepted = number if option is float else isinstance(value, option) and not (option is int and value is True)
        if option is int and isinstance(value, bool):
            accepted = False
        if not accepted:
            names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
            return f"must be {names.get(option, option.__name__)}, got {value!r}"
        if option is str and not value.strip():
            return "must not be empty"
        if number and not math.isfinite(value):
            return f"must be finite, got {value}"
        pattern = bounds.get("pattern")
        if pattern is not None and not re.fullmatch(pattern, value):
            return f"must match {pattern}, got {value!r}"
        low, high = bounds.get("low"), bounds.get("high")
        if number and low is not None and not (low <= value and (high is None or value <= high)):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            return f"must be {limits}, got {value}"
    return None


def _check_entries(value: Any, pattern: str, words: str) -> str | None:
    """The same for a list of texts. The value is not repeated: it may be a key."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        return 'must be a list of texts, e.g. ["a", "b"]'
    wrong = next((number for number, entry in enumerate(value, 1) if not re.fullmatch(pattern, entry)), None)
    return None if wrong is None else f"entry {wrong} must be {words}"


def _check_together(config: Config, problems: list[str]) -> None:
    if (config.server.tls_cert is None) != (config.server.tls_key is None):
        problems.append("server.tls_cert and server.tls_key go together: set both or neither")
    if config.engine.max_tick_tokens < config.engine.max_seqs:
        problems.append(
            f"engine.max_tick_tokens ({config.engine.max_tick_tokens}) must be at least engine.max_seqs "
            f"({config.engine.max_seqs}): every running request may need one row of a tick"
        )
    if config.exit.max_loops is not None and config.exit.min_loops > config.exit.max_loops:
        problems.append(
            f"exit.min_loops ({config.exit.min_loops}) is greater than exit.max_loops ({config.exit.max_loops})"
        )
    problems.extend(refusals(config))
    sizes = [f"kv.{key}" for key in ("pages", "bytes", "memory_fraction") if getattr(config.kv, key) is not None]
    if len(sizes) > 1:
        problems.append(f"{' and '.join(sizes)} all give the size of the cache: set one of them")
    device = config.engine.device
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        problems.append(f"engine.device must be cpu, cuda or cuda:<index>, got {device!r}")
