"""The configuration tree, read from TOML, `--set` overrides and Python dicts, and checked as a whole.

Every problem is collected and reported at once, with the file's line and the nearest valid key. A key exists here
only when it does something.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlt.depth.table import MAX_THRESHOLD, RULES
from rlt.errors import ConfigError
from rlt.settings import check_value, converted, nearest, parse_assignment, read_toml, where_is
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
    #: "dummy": only config.json and the text files are read, and random weights are made
    load_format: Literal["safetensors", "dummy"] = "safetensors"
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
        sources.append((*read_toml(path), str(path)))
    if overrides is not None:
        sources.append((overrides, "", "config"))
    for text in assignments:
        assignment = parse_assignment(text, problems)
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


def _merge(
    tree: Mapping[str, Any], toml_text: str, origin: str, values: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    for section, entries in tree.items():
        cls = SECTIONS.get(section)
        where = where_is(origin, toml_text, section, None)
        if cls is None:
            problems.append(f"{where}: unknown section [{section}]{nearest(section, SECTIONS)}")
            continue
        if not isinstance(entries, Mapping):
            problems.append(f"{where}: [{section}] must be a table")
            continue
        fields = {f.name: f for f in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        for name, value in entries.items():
            where = where_is(origin, toml_text, section, name)
            if name not in fields:
                problems.append(f"{where}: unknown key {section}.{name}{nearest(name, fields)}")
                continue
            problem = check_value(value, hints[name], fields[name].metadata)
            if problem:
                problems.append(f"{where}: {section}.{name} {problem}")
                continue
            values[section][name] = converted(value, hints[name])


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
