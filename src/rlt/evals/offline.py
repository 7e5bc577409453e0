"""Answers from a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlt.errors import ConfigError, GenerationError
from rlt.evals.answers import Answer, Asked, Prompt
from rlt.models.directory import resolve_model
from rlt.text.chat import ChatTemplateError, load_chat_template
from rlt.text.reasoning import Begin, ReasoningSplitter, begin_of, reasoning_mode
from rlt.text.tokenizer import load_tokenizer
from rlt_protocols.params import ParamError, SamplingParams, resolve

if TYPE_CHECKING:
    from rlt.llm import LLM

#: what only says where the model is
_NAMES = ("path", "served_name")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A question that the engine will take: its place among those asked, and where its answer starts."""

    index: int
    ids: list[int]
    params: SamplingParams
    begin: Begin | None


class LlmAnswerer:
    """Asks `llm`, and closes it in the end. `thinking` is the chat template's option enable_thinking.

    Raises `ConfigError` for a model without a tokenizer, or for conversations (`chat`) one without a chat template.
    """

    def __init__(self, llm: LLM, *, chat: bool, thinking: bool | None = None) -> None:
        self._llm = llm
        self._config: dict[str, Any] = llm.settings()
        model = self._config["model"]
        directory = resolve_model(model["path"], model["revision"], model["load_format"])
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise ConfigError([f"--model: {model['path']} has no tokenizer, so it cannot be asked in words"])
        self._tokenizer = tokenizer
        override = model["chat_template"]
        self._template = load_chat_template(directory, None if override is None else Path(override)) if chat else None
        if chat and self._template is None:
            raise ConfigError([f"--model: {model['path']} has no chat template; set model.chat_template to a file"])
        self._mode = reasoning_mode(model["reasoning"], self._template)
        thinking = model["enable_thinking"] if thinking is None else thinking
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        if thinking and self._template is not None and "enable_thinking" not in self._template.options:
            raise ConfigError(["--thinking, model.enable_thinking: the model's chat template has no such option"])

    @property
    def model(self) -> str:
        return self._llm.info.name

    @property
    def loops(self) -> int | None:
        return self._llm.info.loops

    @property
    def full_depth(self) -> str | None:
        return self._llm.info.full_depth

    @property
    def exit_rule(self) -> str | None:
        return self._llm.info.exit_rule

    @property
    def settings(self) -> dict[str, object]:
        config = self._config
        return {
            **{f"model.{key}": value for key, value in config["model"].items() if key not in _NAMES},
            **{f"exit.{key}": value for key, value in config["exit"].items()},
            "kv.layout": config["kv"]["layout"],
            "engine.device": config["engine"]["device"],
        }

    def answers(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Answer]]:
        batch: list[_Ready] = []
        for index, (prompt, params) in enumerate(asked):
            try:
                ids, begin = self._encode(prompt)
                # The engine checks a batch as a whole; here one question must not cost the others their answer.
                resolve(params, self._llm.info, len(ids), random_seed=0)
            except (ParamError, ChatTemplateError) as error:
                yield index, Answer(error=str(error), refused=True)
            else:
                batch.append(_Ready(index, ids, params, begin))
        yield from self._run(batch)

    def close(self) -> None:
        self._llm.close()

    def _encode(self, prompt: Prompt) -> tuple[list[int], Begin | None]:
        """Token ids of a prompt, and whether its answer starts inside reasoning (see `rlt.text.reasoning`)."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt), None
        assert self._template is not None, "asked for a conversation without a template"
        text = self._template.render(prompt, kwargs=self._options)
        return self._tokenizer.encode(text, add_special_tokens=False), begin_of(text, self._mode)

    def _run(self, batch: list[_Ready]) -> Iterator[tuple[int, Answer]]:
        if not batch:
            return
        waiting = dict(enumerate(batch))
        texts = [""] * len(batch)
        depths: list[list[int]] = [[] for _ in batch]
        try:
            for delta in self._llm.stream([one.ids for one in batch], [one.params for one in batch]):
                texts[delta.index] += delta.text
                depths[delta.index] += delta.depths
                if delta.finish_reason is not None:
                    one = waiting.pop(delta.index)
                    yield one.index, _answer(one, texts[delta.index], depths[delta.index], delta.finish_reason)
            return
        except GenerationError as error:
            broken = str(error)
        left = list(waiting.values())
        if len(left) == 1:
            yield left[0].index, Answer(error=broken)
            return
        # The error does not say whose it is, and ends the whole batch: halves find the question at fault.
        yield from self._run(left[: len(left) // 2])
        yield from self._run(left[len(left) // 2 :])


def _answer(one: _Ready, text: str, depths: list[int], finish_reason: str) -> Answer:
    """An answer divided as the server divides it."""
    reasoning = None
    if one.begin is not None:
        splitter = ReasoningSplitter(one.begin)
        parts = splitter.feed(text, final=True)
        text, reasoning = parts.content, parts.reasoning if splitter.reasoned else None
    return Answer(text, len(depths), sum(depths), finish_reason, reasoning)
