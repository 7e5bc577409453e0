from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.fake_answerer import FakeAnswerer
from evals.fake_endpoint import completion, serving
from rlt.cli import evaluate
from rlt.cli.evaluate import open_answerer, parse_numbers
from rlt.cli.main import main
from rlt.errors import ConfigError
from rlt.evals.answers import Answer, Asked
from rlt.evals.tasks import examples

ANSWERS = {example.prompt: example.answer for example in examples("heldout", 2, 0)}


def knows(asked: Asked) -> Answer:
    return Answer(f" {ANSWERS[str(asked.prompt)]}", tokens=2, loops=2 * (asked.params.max_loops or 3))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAnswerer:
    answerer = FakeAnswerer(knows)
    monkeypatch.setattr(evaluate, "open_answerer", lambda *args, **kwargs: answerer)
    return answerer


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["eval", *words])
    return int(caught.value.code or 0)


class TestTasks:
    def test_json_has_the_promised_structure(self, fake: FakeAnswerer, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("tasks", "--n", "2", "--thresholds", "0.5", "--loops", "1,4", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert {
            "model",
            "tasks",
            "exact_match",
            "mean_loops",
            "by_loops",
            "by_threshold",
            "env",
            "command",
        } <= result.keys()
        assert (result["exact_match"], result["mean_loops"], result["by_loops"]) == (1.0, 3.0, {"1": 1.0, "4": 1.0})
        assert result["by_threshold"] == {"0.5": {"exact_match": 1.0, "mean_loops": 4.0}}
        assert result["env"]["torch"]
        assert fake.closed

    def test_shows_a_table(self, fake: FakeAnswerer, capsys: pytest.CaptureFixture[str]) -> None:
        fake.full_depth = "no gate"
        assert run("tasks", "--n", "2") == 0
        out = capsys.readouterr().out
        assert "word_problems" in out
        assert "4 loops" in out
        assert "by_threshold: no gate" in out

    def test_failures_fail_the_command(self, fake: FakeAnswerer, capsys: pytest.CaptureFixture[str]) -> None:
        fake.loops = None
        fake.reply = lambda asked: Answer(error="down")
        assert run("tasks", "--n", "2") == 1
        captured = capsys.readouterr()
        assert captured.err == "rlt: 10 of 10 questions failed; the first: down\n"
        assert "–" in captured.out

    def test_bad_usage(self, fake: FakeAnswerer, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("tasks", "--thresholds", "x") == 2
        assert capsys.readouterr().err == "rlt: --thresholds: 'x' is not a list of numbers such as 0.5,0.9\n"

    def test_asks_a_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return completion(f" {ANSWERS[body['prompt']]}", tokens=2, loops=2 * body.get("max_loops", 3))

        with serving(reply, [{"id": "m", "loops": 2}]) as server:
            assert run("tasks", "--n", "2", "--base-url", f"{server.url}/v1/", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["model"], result["mean_loops"], result["by_loops"]) == ("m", 3.0, {"1": 1.0, "2": 1.0})
        assert list(result["absent"]) == ["by_threshold"]
        assert "torch" not in result["env"]


def write(path: Path, *numbers: int) -> Path:
    entries = [{"question": f"Twice {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in numbers]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "q.jsonl", 1, 2, 3, 4)


def doubles(asked: Asked) -> Answer:
    last = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[-1]["content"]
    number = int(last.rpartition("Twice ")[2].partition("?")[0])
    # Of 4 it knows the number but not how to say it.
    return Answer(f"It is {2 * number}" if number == 4 else f"#### {2 * number}", 2, 6, "stop")


class TestGsm8k:
    @pytest.fixture(autouse=True)
    def _doubles(self, fake: FakeAnswerer) -> Iterator[None]:
        fake.reply = doubles
        yield
        assert fake.closed or not fake.asked

    def test_json(self, fake: FakeAnswerer, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("gsm8k", "--data", str(data), "--shots", "2", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["model"], result["task"], result["n"], result["failed"]) == ("fake", "gsm8k", 2, 0)
        assert (result["exact_match"], result["flexible_extract"]["exact_match"]) == (0.5, 1.0)
        assert result["stderr"] == pytest.approx(0.125**0.5)
        assert result["mean_loops"] == 3.0
        assert "{question}" in result["settings"]["prompt"]
        assert "record" not in result
        assert result["env"]["torch"]
        assert {(p.max_tokens, p.temperature, p.stop, p.seed) for _, p in fake.asked} == {
            (512, 0.0, ("\nQuestion:",), None)
        }

    def test_table(self, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("gsm8k", "--data", str(data), "--shots", "2") == 0
        out = capsys.readouterr().out
        assert "strict match (####)" in out
        assert "50.0%" in out
        assert "1 answers without a strict number" in out

    def test_chat_with_examples_of_another_file(
        self, fake: FakeAnswerer, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train = write(tmp_path / "train.jsonl", 8, 9)
        words = f"--shots-data {train} --shots 1 --limit 3 --chat --thinking --temperature 0.6 --seed 7 --max-loops 2"
        assert run("gsm8k", "--data", str(data), *words.split(), "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["n"], result["exact_match"]) == (3, 1.0)
        assert (result["settings"]["thinking"], result["settings"]["form"]) == (True, "chat")
        prompt, params = fake.asked[-1]
        assert [turn["content"].partition("?")[0] for turn in prompt if isinstance(turn, dict)] == [
            "Twice 8",
            "8 + 8 = 16\n#### 16",
            "Twice 1",
        ]
        assert (params.max_tokens, params.seed, params.max_loops, params.stop) == (4096, 7, 2, ())

    def test_a_stopped_run_goes_on(
        self, fake: FakeAnswerer, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        record = tmp_path / "r.jsonl"
        words = ["gsm8k", "--data", str(data), "--shots", "1", "--record", str(record)]

        def dies(asked: Asked) -> Answer:
            if "Twice 2?\nAnswer:" in str(asked.prompt)[-20:]:
                raise KeyboardInterrupt
            return doubles(asked)

        fake.reply = dies
        assert run(*words) != 0
        assert len(record.read_text().splitlines()) == 3
        fake.reply = lambda asked: Answer(error="down")
        assert run(*words) == 1
        err = capsys.readouterr().err
        assert "rlt: 1 of 3 questions failed; run it again to ask them again; the first: down\n" in err
        fake.reply = doubles
        fake.asked.clear()
        assert run(*words, "--json") == 0
        assert len(fake.asked) == 1
        result = json.loads(capsys.readouterr().out)
        assert (result["n"], result["failed"], result["record"]) == (3, 0, str(record))
        assert run(*words, "--max-tokens", "9") == 2
        assert "was made with other settings: max_tokens was 512 and is 9" in capsys.readouterr().err
        write(data, 1, 2, 5, 4)
        assert run(*words) == 2
        assert "has another question as number 2" in capsys.readouterr().err
        assert len(fake.asked) == 1

    def test_a_server_without_loops_takes_no_depth(
        self, fake: FakeAnswerer, data: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fake.loops = None
        assert run("gsm8k", "--data", str(data), "--shots", "1", "--max-loops", "2") == 2
        assert "the server's model has no loops to set" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--temperature", "--exit-threshold"])
    def test_a_number_must_be_finite(
        self, fake: FakeAnswerer, data: Path, option: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("gsm8k", "--data", str(data), "--shots", "1", option, "inf") == 2
        assert f"{option}: must be a finite number" in capsys.readouterr().err

    def test_a_bad_file_is_bad_usage(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("gsm8k", "--data", str(tmp_path / "none")) == 2
        assert "none: cannot be read" in capsys.readouterr().err


class TestAnswerer:
    LOCAL = (None, None, None, None)

    def test_a_server_needs_none_of_our_settings(self) -> None:
        locals_ = (("cpu", None, None, None), (None, "float32", None, None), (None, None, Path("x"), None))
        for local, option in zip(
            (*locals_, (None, None, None, ["a.b=1"])), ("device", "dtype", "config", "set"), strict=True
        ):
            with pytest.raises(ConfigError, match=f"--{option}: with --base-url, the server has its own"):
                open_answerer(None, local, ("http://h", None, None, None), chat=False, thinking=None)

    def test_options_of_a_server_need_one(self) -> None:
        for remote, option in (((None, None, 3, None), "concurrency"), ((None, None, None, 1.0), "timeout")):
            with pytest.raises(ConfigError, match=f"--{option}: belongs to --base-url"):
                open_answerer(None, self.LOCAL, remote, chat=False, thinking=None)

    def test_thinking_needs_the_chat_form(self) -> None:
        with pytest.raises(ConfigError, match="--thinking: belongs to the chat form"):
            open_answerer(None, self.LOCAL, (None, None, None, None), chat=False, thinking=True)

    def test_a_model_that_cannot_be_asked_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Closing:
            closed = False

            def settings(self) -> Any:
                raise ConfigError(["no"])

            def close(self) -> None:
                self.closed = True

        llm = Closing()
        monkeypatch.setattr(evaluate, "open_llm", lambda *options: llm)
        with pytest.raises(ConfigError):
            open_answerer(None, self.LOCAL, (None, None, None, None), chat=False, thinking=None)
        assert llm.closed


def test_lists_of_numbers_are_checked() -> None:
    assert parse_numbers("--thresholds", "0, 0.5,1e3") == [0.0, 0.5, 1000.0]
    assert parse_numbers("--loops", "1,32", whole=True) == [1.0, 32.0]
    bad = [("a", False, "is not a list of numbers such as 0.5,0.9"), ("-1", False, "must be numbers of 0 or more")]
    bad += [("1.5", True, "is not a list of numbers such as 1,2,4"), ("0", True, "must be numbers of 1 or more")]
    bad += [("nan", False, "must be numbers of 0 or more"), ("inf", False, "must be numbers of 0 or more")]
    for text, whole, line in bad:
        with pytest.raises(ConfigError, match=f"--x: '{text}' {line}"):
            parse_numbers("--x", text, whole=whole)
