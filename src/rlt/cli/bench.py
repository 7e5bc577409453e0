"""`rlt bench`: latency and throughput of the engine in this process, and load for a server."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from rlt.cli.options import Assignments, ConfigFile, Device, Dtype, Json, Model, Seed, command_line, open_llm
from rlt.errors import RltError

app = typer.Typer(no_args_is_help=True, help="Speed, as one JSON result each.", pretty_exceptions_enable=False)

PromptTokens = Annotated[int, typer.Option(min=1, help="Random token ids per prompt.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate per request; ends of text are ignored.")]
Loops = Annotated[
    int | None, typer.Option(min=1, help="Loops per token, without early exit (default: the model's rule).")
]


@app.command()
def latency(
    *,
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    prompt_tokens: PromptTokens = 64,
    max_tokens: MaxTokens = 64,
    loops: Loops = None,
    repeats: Annotated[int, typer.Option(min=1, help="Counted runs, after one that warms up.")] = 5,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Time to the first token and per step, for a fixed batch."""
    from rlt.bench import floor as floors
    from rlt.bench import offline
    from rlt.bench.workload import random_prompts
    from rlt.engine import choose_device, choose_dtype

    llm = open_llm(model, device, dtype, config, assignments)
    try:
        prompts = random_prompts(batch, prompt_tokens, seed)
        result = offline.latency(llm, prompts, offline.fixed_length(max_tokens, loops), repeats)
        settings, spec = llm.settings(), llm.engine.runner.model.spec
    finally:
        llm.close()
    place = choose_device(settings["engine"]["device"])
    numbers = choose_dtype(settings["model"]["dtype"], place)
    result |= floors.beside_floor(result, spec, floors.measure_ceilings(place, numbers), numbers)
    _report(result | {"config": settings}, as_json)


@app.command()
def throughput(
    *,
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests, all handed over at the start.")] = 64,
    prompt_tokens: PromptTokens = 64,
    max_tokens: MaxTokens = 64,
    loops: Loops = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Tokens per second for a whole batch of requests."""
    from rlt.bench import offline
    from rlt.bench.workload import random_prompts

    llm = open_llm(model, device, dtype, config, assignments)
    try:
        prompts = random_prompts(requests, prompt_tokens, seed)
        result = offline.throughput(llm, prompts, offline.fixed_length(max_tokens, loops))
    finally:
        llm.close()
    _report(result | {"config": llm.settings()}, as_json)


@app.command()
def mixed(
    *,
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Short requests that decode from the start.")] = 16,
    prompt_tokens: PromptTokens = 32,
    max_tokens: MaxTokens = 256,
    long_prompts: Annotated[int, typer.Option(min=1, help="Long prompts that arrive meanwhile.")] = 8,
    long_tokens: Annotated[int, typer.Option(min=1, help="Token ids of each long prompt.")] = 1024,
    every_ms: Annotated[float, typer.Option(min=0, help="Time between two of them.")] = 500.0,
    loops: Loops = None,
    versus: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="Run the same load with these settings too, in turn."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Throughput and inter-token times while long prompts arrive; --versus compares two settings in one run."""
    from rlt.bench.mixed import MixedLoad, compare
    from rlt.bench.offline import fixed_length
    from rlt.bench.workload import random_prompts

    llm = open_llm(model, device, dtype, config, assignments)
    other = open_llm(model, device, dtype, config, [*(assignments or ()), *versus]) if versus else None
    load = MixedLoad(
        short=random_prompts(requests, prompt_tokens, seed),
        params=fixed_length(max_tokens, loops),
        long=random_prompts(long_prompts, long_tokens, seed + 1),
        long_params=fixed_length(1, loops),
        every_s=every_ms / 1e3,
    )
    engines = {"this": llm.engine} | ({" ".join(versus): other.engine} if versus and other is not None else {})
    result = compare(engines, load, repeats)
    _report({"shape": llm.info.name} | result | {"config": llm.settings()}, as_json)
    llm.close()
    if other is not None:
        other.close()


@app.command()
def host(
    *,
    running: Annotated[str, typer.Option(help="Numbers of running requests, separated by commas.")] = "1,64,256,1024",
    layout: Annotated[str, typer.Option(help="kv.layout.")] = "last_exited",
    as_json: Json = False,
) -> None:
    """What a tick costs the host: planning, page bookkeeping and results, in microseconds, without a device."""
    from rlt.bench.host import measure

    counts = _counts("--running", running)
    _report({"layout": layout, "by_running": {str(n): measure(n, layout=layout) for n in counts}}, as_json, local=False)


@app.command()
def floor(
    *,
    model: Model = None,
    rows: Annotated[str, typer.Option(help="Numbers of decoding requests, separated by commas.")] = "1,8,32,128",
    context: Annotated[int, typer.Option(min=1, help="Positions that each attends to.")] = 512,
    loops: Loops = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """The least time of a decode step: this device's measured rates, and what the model's shape makes it do."""
    from rlt.bench import floor as floors
    from rlt.config import load_config
    from rlt.engine import choose_device, choose_dtype
    from rlt.models.checkpoint import read_spec
    from rlt.models.directory import resolve_model

    counts = _counts("--rows", rows)
    directory = resolve_model(model or load_config().model.path)
    spec = read_spec(directory)
    place = choose_device(device)
    numbers = choose_dtype(dtype or "auto", place)
    depth = loops or spec.loops
    if depth > spec.loops:
        raise RltError(f"--loops {depth}: the model has {spec.loops}")
    ceilings = floors.measure_ceilings(place, numbers)
    by_rows = {str(n): floors.floor(spec, ceilings, numbers, n, context, depth) for n in counts}
    result: dict[str, Any] = {"shape": directory.name, "context": context, "loops": depth, "dtype": str(numbers)[6:]}
    _report(result | {"ceilings": floors.rates(ceilings)} | {"by_rows": by_rows}, as_json)


@app.command()
def serve(
    *,
    base_url: Annotated[str, typer.Option(help="Server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for (default: the server's first).")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 100,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at a time (default: 8, or no limit with --rate).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second, at random times (Poisson).")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Random token ids per prompt (default: task prompts as text).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Generate --max-tokens always (not every server can).")] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    loops: Loops = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Latencies and rates of any OpenAI-compatible server, from streamed completions."""
    from rlt.bench.serve import Load, measure
    from rlt.bench.workload import random_prompts, task_prompts

    fields: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        fields["ignore_eos"] = True
    if loops is not None:
        fields |= {"max_loops": loops, "min_loops": loops}
    load = Load(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        model=model,
        prompts=random_prompts(requests, prompt_tokens, seed) if prompt_tokens else task_prompts(requests, seed),
        max_tokens=max_tokens,
        concurrency=concurrency or (8 if rate is None else None),
        rate=rate,
        seed=seed,
        fields=fields,
        api_key=api_key,
    )
    result = asyncio.run(measure(load))
    result["config"] = {
        "base_url": load.base_url,
        "concurrency": load.concurrency,
        "rate": rate,
        "prompt": "tasks" if prompt_tokens is None else prompt_tokens,
        "max_tokens": max_tokens,
        **fields,
    }
    _report(result, as_json, local=False)
    if result["failed"]:
        raise RltError(f"{result['failed']} of {requests} requests failed; the first: {result['first_error']}")


def _counts(option: str, words: str) -> list[int]:
    """Numbers of at least 1 that are separated by commas. Raises `RltError`."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in words.split(",")]
    if min(counts) < 1:
        raise RltError(f"{option} {words}: must be numbers of at least 1, separated by commas")
    return counts


def _report(result: dict[str, Any], as_json: bool, local: bool = True) -> None:
    """Print a result; `local` says that this process did the computing, so torch is part of the environment."""
    from rlt.bench import environment

    result |= {"env": environment(with_torch=local), "command": command_line(sys.argv[1:])}
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in result.items():
        if name != "config":
            parts = (f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else (str(value),)
            table.add_row(name, "  ".join(parts))
    Console().print(table)
