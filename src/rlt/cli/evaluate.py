"""`rlt eval`: how often a model answers right, and how that depends on the number of loops."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt.cli.options import Assignments, ConfigFile, Device, Dtype, Json, Model, Seed, command_line, open_llm
from rlt.errors import ConfigError

if TYPE_CHECKING:
    from rlt.evals.answers import Answerer

app = typer.Typer(
    no_args_is_help=True, help="Accuracy on tasks with checkable answers.", pretty_exceptions_enable=False
)

BaseUrl = Annotated[
    str | None, typer.Option(help="Ask this OpenAI-compatible server (without /v1) instead; --model is its model then.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token for --base-url.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Most requests at a time with --base-url (default: 16).")]
Timeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds to wait for one answer with --base-url (default: 1800).")
]
Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="The chat template's enable_thinking, in chat form.")
]


class Form(StrEnum):
    """How a question is put."""

    RAW = "raw"
    CHAT = "chat"


@app.callback()
def _group() -> None:
    pass


@app.command()
def tasks(
    *,
    model: Model = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Examples per task.")] = 200,
    form: Annotated[Form, typer.Option(help="As text to continue, or as a chat.")] = Form.RAW,
    loops: Annotated[
        str | None, typer.Option(help="Numbers of loops to compare, separated by commas (default: the model's).")
    ] = None,
    thresholds: Annotated[
        str | None, typer.Option(help="Exit thresholds to compare, separated by commas (default: the exit rule's).")
    ] = None,
    thinking: Thinking = None,
    seed: Seed = 0,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Exact match on the built-in tasks' held-out wording: at the model's defaults, per depth and per threshold."""
    from rlt.cli import eval_tables
    from rlt.evals.accuracy import evaluate, make_plan
    from rlt.evals.tasks import examples

    depths = None if loops is None else [int(m) for m in parse_numbers("--loops", loops, whole=True)]
    levels = None if thresholds is None else parse_numbers("--thresholds", thresholds)
    chat = form is Form.CHAT
    local = (device, dtype, config, assignments)
    remote = (base_url, api_key, concurrency, timeout)
    with closing(open_answerer(model, local, remote, chat=chat, thinking=thinking)) as answerer:
        plan, questions = make_plan(answerer, depths, levels), list(examples("heldout", n, seed))
        with progress("answers", plan.runs * len(questions)) as step:
            result = evaluate(answerer, questions, form.value, plan, step)
    _report(result, base_url, as_json, eval_tables.print_tasks)
    if failed := result.get("failed"):
        _fail(failed, plan.runs * len(questions), result["first_error"], "")


@app.command()
def gsm8k(
    *,
    data: Annotated[Path, typer.Option(help="JSON lines with question and answer, such as GSM8K's test file.")],
    shots_data: Annotated[
        Path | None,
        typer.Option(help="File to take the worked examples from, such as its train file (default: --data)."),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Worked examples: the first lines of their file.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only so many questions.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep what came of each question here; a run that was stopped goes on from it.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a chat, for instruct and thinking models.")] = False,
    thinking: Thinking = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer (default: 512, or 4096 with --chat).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Question i is sampled with this seed + i, at a temperature above 0.")] = 0,
    min_loops: Annotated[int | None, typer.Option(min=1)] = None,
    max_loops: Annotated[int | None, typer.Option(min=1, help="Most loops per token.")] = None,
    exit_threshold: Annotated[float | None, typer.Option(min=0, help="On the exit rule's scale.")] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Exact match on grade-school mathematics (GSM8K) from a local file."""
    from rlt.cli import eval_tables
    from rlt.evals.gsm8k import RAW_STOP, choose, read_questions
    from rlt.evals.gsm8k_run import Exam, check, run, summary, unanswered
    from rlt.evals.records import RecordFile
    from rlt_protocols.params import SamplingParams

    examples, questions = choose(
        read_questions(data), None if shots_data is None else read_questions(shots_data), shots, limit
    )
    for option, value in (("--temperature", temperature), ("--exit-threshold", exit_threshold)):
        if value == float("inf"):
            raise ConfigError([f"{option}: must be a finite number"])
    params = SamplingParams(
        max_tokens=max_tokens or (4096 if chat else 512),
        temperature=temperature,
        seed=seed if temperature > 0 else None,
        stop=() if chat else RAW_STOP,
        min_loops=min_loops,
        max_loops=max_loops,
        exit_threshold=exit_threshold,
    )
    exam = Exam("chat" if chat else "raw", examples, questions, params, thinking)
    local = (device, dtype, config, assignments)
    remote = (base_url, api_key, concurrency, timeout)
    with closing(open_answerer(model, local, remote, chat=chat, thinking=thinking)) as answerer:
        if answerer.loops is None and (min_loops, max_loops, exit_threshold) != (None, None, None):
            raise ConfigError(["--min-loops, --max-loops, --exit-threshold: the server's model has no loops to set"])
        settings = exam.settings(answerer)
        with RecordFile(record, settings) as file:
            check(exam, file)
            with progress("questions", len(questions), len(questions) - len(unanswered(exam, file))) as step:
                records = run(answerer, exam, file, step)
    result = {"model": settings["model"], "task": "gsm8k", **summary(records), "settings": settings}
    _report(result | ({} if record is None else {"record": str(record)}), base_url, as_json, eval_tables.print_gsm8k)
    if failed := result["failed"]:
        hint = "; run it again to ask them again" if record is not None else ""
        _fail(failed, len(records), result["first_error"], hint)


def parse_numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    """Numbers out of a comma-separated list: 0 or more, or `whole` ones of 1 or more. Raises `ConfigError`."""
    example = "1,2,4" if whole else "0.5,0.9"
    try:
        values = [float(int(part) if whole else float(part)) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError([f"{option}: {text!r} is not a list of numbers such as {example}"]) from error
    low = 1 if whole else 0
    if not all(low <= value < float("inf") for value in values):
        raise ConfigError([f"{option}: {text!r} must be numbers of {low} or more"])
    return values


def open_answerer(
    model: str | None,
    local: tuple[str | None, str | None, Path | None, list[str] | None],
    remote: tuple[str | None, str | None, int | None, float | None],
    *,
    chat: bool,
    thinking: bool | None,
) -> Answerer:
    """Who answers: the server of `remote` (base URL, API key, concurrency, timeout), or without a base URL the model
    of `local` (device, dtype, configuration file, assignments) in this process. Raises `RltError`."""
    base_url, api_key, concurrency, timeout_s = remote
    if thinking is not None and not chat:
        raise ConfigError(["--thinking: belongs to the chat form"])
    if base_url is None:
        for option, value in (("--concurrency", concurrency), ("--timeout", timeout_s)):
            if value is not None:
                raise ConfigError([f"{option}: belongs to --base-url"])
        from rlt.evals.offline import LlmAnswerer

        llm = open_llm(model, *local)
        try:
            return LlmAnswerer(llm, chat=chat, thinking=thinking)
        except BaseException:
            llm.close()
            raise
    for option, setting in zip(("--device", "--dtype", "--config", "--set"), local, strict=True):
        if setting:
            raise ConfigError([f"{option}: with --base-url, the server has its own"])
    from rlt.evals.endpoint import CONCURRENCY, TIMEOUT_S, Endpoint, EndpointAnswerer

    endpoint = Endpoint(
        base_url.rstrip("/").removesuffix("/v1"),
        model,
        api_key,
        concurrency=concurrency or CONCURRENCY,
        timeout_s=timeout_s or TIMEOUT_S,
        thinking=thinking,
    )
    return EndpointAnswerer(endpoint)


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; the callable moves it on by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda: bar.advance(task)


def _report(
    result: dict[str, Any], base_url: str | None, as_json: bool, show: Callable[[dict[str, Any]], None]
) -> None:
    from rlt.bench import environment

    if as_json:
        target = {} if base_url is None else {"base_url": base_url}
        made = {"env": environment(with_torch=base_url is None), "command": command_line(sys.argv[1:])}
        typer.echo(json.dumps(result | target | made))
    else:
        show(result)


def _fail(failed: int, total: int, first_error: str, hint: str) -> None:
    from rlt.evals.answers import EvalError

    raise EvalError(f"{failed} of {total} questions failed{hint}; the first: {first_error}")
