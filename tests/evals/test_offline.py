from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlt import LLM
from rlt.config import ModelConfig
from rlt.errors import ConfigError, GenerationError
from rlt.evals.answers import Answer, Asked, collect
from rlt.evals.offline import LlmAnswerer
from rlt.llm import Delta
from rlt_protocols.params import ModelInfo, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, stop=("\n",))
TURNS = [{"role": "user", "content": "Hi"}]
INFO = ModelInfo(
    name="tiny",
    family="ouro",
    vocab_size=1024,
    max_model_len=64,
    loops=4,
    min_loops=1,
    max_loops=4,
    exit_threshold=0.5,
    eos_token_ids=(0,),
    kv_tokens=1000,
)


class FakeLlm:
    """Answers a prompt of n tokens with n times "x" and depths of 2; whole batches fail on a prompt of `bad` tokens."""

    info = INFO

    def __init__(self, bad: int | None = None, text: str = "x", **model: Any) -> None:
        self.bad, self.text = bad, text
        self.model = dataclasses.asdict(ModelConfig(dtype="float32", **model))
        self.batches: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.closed = False

    def settings(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engine": {"device": "cpu"},
            "kv": {"layout": "shared"},
            "exit": {"rule": "ouro"},
        }

    def stream(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[Delta]:
        self.batches.append([len(prompt) for prompt in prompts])
        self.prompts += prompts
        for index, prompt in enumerate(prompts):
            if len(prompt) == self.bad:
                raise GenerationError("not finite")
            yield Delta(index, self.text, (1,), (2,))
            yield Delta(index, self.text * (len(prompt) - 1), (), (), "stop")

    def close(self) -> None:
        self.closed = True


def made(llm: Any, chat: bool = False, **options: Any) -> LlmAnswerer:
    return LlmAnswerer(llm, chat=chat, **options)


def words(*counts: int) -> list[Asked]:
    return [Asked("A" * count, GREEDY) for count in counts]


def tokens(answerer: LlmAnswerer, text: str) -> int:
    return len(answerer._encode(text)[0])


def test_the_built_in_model_answers_as_it_does_alone() -> None:
    prompts = ["Q: What is 345 + 278?\nA:", "Q: What is 12 - 7?\nA:"]
    with LLM("tiny-ouro", device="cpu", dtype="float32", config={"kv": {"pages": 200}}) as llm:
        expected = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
        answerer = made(llm, chat=True)
        asked = [*(Asked(prompt, GREEDY) for prompt in prompts), Asked(TURNS, GREEDY)]
        *answers, chat = collect(answerer, asked, lambda: None)
        assert (answerer.model, answerer.loops, answerer.full_depth) == ("tiny-ouro", 4, None)
        assert answerer.exit_rule == "ouro"
        kept = answerer.settings
    assert answers == [Answer(o.text, len(o.token_ids), sum(o.depths), o.finish_reason) for o in expected]
    assert [answer.text for answer in answers] == [" 623", " 5"]
    assert (kept["model.dtype"], kept["engine.device"], kept["kv.layout"]) == ("float32", "cpu", "last_exited")
    assert "exit.rule" in kept
    assert "model.path" not in kept
    assert (chat.error, chat.reasoning) == (None, None)


def test_a_question_that_does_not_fit_costs_only_itself() -> None:
    llm = FakeLlm()
    short, long, other = collect(made(llm), words(1, 500, 2), lambda: None)
    assert (short.text, other.error) == ("x", None)
    assert long.refused
    assert "the model's context is 64 tokens" in str(long.error)
    assert len(llm.batches) == 1


def test_a_computation_that_fails_is_traced_to_its_question() -> None:
    prompts = ["Q", "Q: 1", "Q: 1 2 3 4 5", "Q: 1 2", "Q: 1 2 3"]
    lengths = [tokens(made(FakeLlm()), prompt) for prompt in prompts]
    assert len(set(lengths)) == len(lengths)
    llm = FakeLlm(bad=lengths[2])
    answers = collect(made(llm), [Asked(prompt, GREEDY) for prompt in prompts], lambda: None)
    assert answers[2] == Answer(error="not finite")
    assert [answer.text for answer in answers if answer.error is None] == [
        "x" * length for index, length in enumerate(lengths) if index != 2
    ]
    # What had its answer is not asked again.
    assert llm.batches == [lengths, lengths[2:3], lengths[3:]]


def test_no_questions_need_no_model() -> None:
    llm = FakeLlm()
    assert list(made(llm).answers([])) == []
    assert llm.batches == []


def template(tmp_path: Path, source: str) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(source)
    return str(path)


def test_reasoning_is_split_off_as_in_the_server(tmp_path: Path) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    llm = FakeLlm(text="a</think>b", chat_template=template(tmp_path, source))
    (answer,) = collect(
        made(llm, True, thinking=True), [Asked([{"role": "user", "content": "Q"}], GREEDY)], lambda: None
    )
    assert answer.reasoning == "a"
    assert answer.text.startswith("b")
    by_config = FakeLlm(text="a</think>b", enable_thinking=True, chat_template=template(tmp_path, source))
    (answer,) = collect(made(by_config, True), [Asked([{"role": "user", "content": "Q"}], GREEDY)], lambda: None)
    assert answer.reasoning == "a"
    unfinished = FakeLlm(text="a", chat_template=template(tmp_path, source))
    (answer,) = collect(
        made(unfinished, True, thinking=True), [Asked([{"role": "user", "content": "Q"}], GREEDY)], lambda: None
    )
    assert (answer.text, answer.reply) == ("", "")
    assert answer.reasoning


def test_thinking_needs_a_template_that_can(tmp_path: Path) -> None:
    llm = FakeLlm(chat_template=template(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(ConfigError, match=r"--thinking, .*: the model's chat template has no such option"):
        made(llm, True, thinking=True)
    assert made(llm, True, thinking=False).model


def test_a_template_that_refuses_costs_only_its_question(tmp_path: Path) -> None:
    source = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    llm = FakeLlm(chat_template=template(tmp_path, source))
    asked = [Asked([{"role": "user", "content": content}], GREEDY) for content in ("bad", "good")]
    bad, good = collect(made(llm, True), asked, lambda: None)
    assert (bad.refused, good.error) == (True, None)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"bare has no tokenizer, so it cannot be asked in words"):
        made(FakeLlm(path=str(bare)))
    (bare / "tokenizer.json").write_bytes(_tokenizer_file().read_bytes())
    made(FakeLlm(path=str(bare)))
    with pytest.raises(ConfigError, match=r"bare has no chat template; set model.chat_template to a file"):
        made(FakeLlm(path=str(bare)), chat=True)


def _tokenizer_file() -> Path:
    from rlt.models.directory import resolve_model

    return resolve_model("tiny-ouro") / "tokenizer.json"
