"""Offline use: the daemon's engine in this process, with text in and text out."""

from __future__ import annotations

import dataclasses
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlt.config import load_config
from rlt.engine import Engine
from rlt.errors import GenerationError
from rlt.models.directory import resolve_model
from rlt.progress import Progress
from rlt.text.answer import AnswerText
from rlt.text.detokenize import PROMPT_TAIL_TOKENS
from rlt.text.tokenizer import load_tokenizer
from rlt_protocols.engine import Route
from rlt_protocols.params import SEED_LIMIT, ModelInfo, ParamError, SamplingParams, resolve
from rlt_protocols.text import SpelledLogprob, open_text

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """An answer. `depths[i]` is the number of loops that ran for `token_ids[i]`, 1 to the model's loops."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    #: one per token when `SamplingParams.logprobs` is set, else empty
    logprobs: list[SpelledLogprob] = field(default_factory=list)
    #: "stop", "length" or "error"
    finish_reason: str | None = None
    #: the stop string or stop token id that ended the text, if one did
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers (one, for now)."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one tick added to the answer of prompt number `index`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    #: prompt tokens whose keys and values came from the prefix cache
    cached_tokens: int = 0
    logprobs: tuple[SpelledLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class _Open:
    """A request in the engine: its place among its stream's prompts, its text, and where its deltas go."""

    index: int
    answer: AnswerText
    inbox: deque[tuple[str, Delta | GenerationError]]


#: offline there are no other processes
_ROUTE = Route(0, 0, 0)


class LLM:
    """A model in this process. `config` is the same tree as the daemon's TOML file and checked the same way.

    `progress` is called with the weight file that is read and the share of the model that is loaded, 0 to 1.
    Raises `rlt.errors.ConfigError`, `ModelError` or `MemoryPlanError` when the model cannot be opened. Not thread-safe.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        tree = {section: dict(values) for section, values in (config or {}).items()}
        for section, key, value in (("model", "path", model), ("engine", "device", device), ("model", "dtype", dtype)):
            if value is not None:
                tree.setdefault(section, {})[key] = value
        self._config = load_config(overrides=tree)
        self.engine = Engine(self._config, progress)
        opened = self._config.model
        self._tokenizer = load_tokenizer(resolve_model(opened.path, opened.revision, opened.load_format))
        self._count = 0
        self._open: dict[str, _Open] = {}

    @property
    def info(self) -> ModelInfo:
        """Name, limits and defaults of the model."""
        return self.engine.info

    def settings(self) -> dict[str, Any]:
        """The whole configuration as a nested dict."""
        return dataclasses.asdict(self._config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer `prompts` (texts or lists of token ids), batched, with one setting for all or one each.

        Raises `ParamError` naming the field before anything runs, and `GenerationError` if the model computed numbers
        that are not finite.
        """
        batch = _as_list(prompts)
        encoded = [self._encode(prompt) for prompt in batch]
        outputs = [
            RequestOutput(prompt if isinstance(prompt, str) else None, ids, [CompletionOutput()])
            for prompt, ids in zip(batch, encoded, strict=True)
        ]
        for delta in self._stream(encoded, params):
            answer = outputs[delta.index].outputs[0]
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.depths += delta.depths
            answer.logprobs += delta.logprobs
            answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
            outputs[delta.index].cached_tokens = delta.cached_tokens
        return outputs

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Delta]:
        """Like `generate`, but yields what each tick adds. Leaving the generator early drops what still runs."""
        return self._stream([self._encode(prompt) for prompt in _as_list(prompts)], params)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: ticks, rows by kind, mean loops per token and so on; pages by state now."""
        stats = self.engine.stats()
        return {
            "ticks": stats.ticks,
            "rows": stats.tick_rows,
            "mean_loops": stats.token_loops / stats.tokens if stats.tokens else None,
            "preemptions": self.engine.scheduler.preemptions,
            "prefix_hit_tokens": self.engine.scheduler.hit_tokens,
            "pages": stats.kv_pages,
        }

    def close(self) -> None:
        """Give the model's memory back; the object and its open streams cannot be used any more."""
        self._open.clear()
        del self.engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            for index, token in enumerate(prompt):
                if type(token) is not int:
                    raise ParamError("prompt", f"token ids must be integers, got {token!r} at index {index}")
            return list(prompt)
        if self._tokenizer is None:
            raise ParamError("prompt", "this model directory has no tokenizer; give token ids")
        return self._tokenizer.encode(prompt)

    def _stream(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[Delta]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        resolved = [
            resolve(one, self.info, len(ids), random_seed=secrets.randbelow(SEED_LIMIT))
            for one, ids in zip(params, prompts, strict=True)
        ]
        inbox: deque[tuple[str, Delta | GenerationError]] = deque()
        mine: set[str] = set()
        try:
            for index, (ids, settings) in enumerate(zip(prompts, resolved, strict=True)):
                name = f"offline-{self._count}"
                self._count += 1
                self.engine.add(name, ids, settings)
                mine.add(name)
                opened = open_text(name, _ROUTE, settings, ids[-PROMPT_TAIL_TOKENS:])
                self._open[name] = _Open(index, AnswerText(self._tokenizer, opened), inbox)
            while mine:
                while inbox:
                    name, delta = inbox.popleft()
                    if isinstance(delta, GenerationError):
                        raise delta
                    if delta.finish_reason is not None:
                        mine.remove(name)
                    yield delta
                if mine:
                    self._step()
        finally:
            for name in mine & self._open.keys():
                del self._open[name]
                self.engine.abort(name)

    def _step(self) -> None:
        """Run a tick and file what it produced with the streams that wait for it; there may be several."""
        for tokens in self.engine.step():
            request = self._open.get(tokens.request_id)
            # A request that a stop string ended may still get a token from the tick that was under way.
            if request is None:
                continue
            if tokens.error is not None:
                del self._open[tokens.request_id]
                request.inbox.append((tokens.request_id, GenerationError(tokens.error)))
                continue
            delta = request.answer.take(tokens)
            if delta.finish_reason is not None:
                del self._open[tokens.request_id]
                self.engine.abort(tokens.request_id)
            reasons = (delta.finish_reason, delta.stop_reason)
            parts = (delta.text, delta.token_ids, delta.depths, *reasons, delta.cached_tokens, delta.logprobs)
            request.inbox.append((tokens.request_id, Delta(request.index, *parts)))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
