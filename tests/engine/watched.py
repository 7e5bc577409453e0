"""Small engines under observation: every answer is held against the dense reference, every step against the accounts.

Switches and values that the configuration does not have are left out, so this grows with the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.small_models import HIDDEN, HUGINN, NANBEIGE, OURO, Shape, write_model
from reference.dense import Answer
from reference.families import DenseHuginn, DenseNanbeige, DenseOuro
from reference.penalties import Penalties
from rlt.config import SECTIONS, load_config
from rlt.engine import Engine
from rlt.errors import ConfigError
from rlt.models.huginn import initial_state
from rlt.support import exit_rule
from rlt_protocols.params import ParamError, ResolvedParams, SamplingParams, resolve
from rlt_protocols.text import Tokens

SHAPES = OURO + HUGINN + NANBEIGE
#: By rule: thresholds at which tokens leave at all depths (three of them), always at once, and never.
GATE_LEVELS = (0.5, 0.3, 0.8, 0.0, 1.0)
LEVELS = {
    "ouro": GATE_LEVELS,
    "ouro_delayed": GATE_LEVELS,
    "random_lookahead": GATE_LEVELS,
    "trace": (None,) * 5,
    "full_depth": (None,) * 5,
    "latent_diff": (0.5, 0.7, 0.3, 5.0, 0.0),
    "cosine": (0.1, 0.2, 0.05, 2.0, 0.0),
    "entropy": (0.3, 0.5, 0.15, 1000.0, 0.0),
    "kl": (1.5, 4.0, 0.5, 1000.0, 0.0),
    "minp_kl": (0.8, 1.3, 0.3, 100.0, 0.0),
    "argmax": (1.0, 1.0, 2.0, 1.0, 100.0),
}
SOMETIMES, EARLIER, LATER, AT_ONCE, NEVER = range(5)
#: Closer decisions may fall either way in float32: a state that loops on sums up more rounding.
NOISE = {"ouro": 1e-4, "huginn": 1e-3, "nanbeige": 1e-4}
DENSE = {"ouro": DenseOuro, "huginn": DenseHuginn, "nanbeige": DenseNanbeige}
#: Depths of output tokens by request, for the rule `trace`; some are outside any limits.
TRACE = [[4, 1, 3, 2], [1, 2], [1, 4, 4, 1, 1, 2, 9], [3], [2, 1, 1]]


def tree(shape: Shape, directory: Path, sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Configuration of a small fp32 engine on one CPU thread, without the switches that do not exist (yet)."""
    merged: dict[str, dict[str, Any]] = {
        "model": {"path": str(directory / model_name(shape)), "dtype": "float32"},
        "engine": {"device": "cpu", "cpu_threads": 1},
    }
    for section, values in sections.items():
        known = {f.name for f in dataclasses.fields(SECTIONS[section])}
        merged.setdefault(section, {}).update({name: value for name, value in values.items() if name in known})
    if merged.get("exit", {}).get("rule") == "trace":
        merged["exit"]["trace_file"] = str(directory / "trace.json")
    return merged


@functools.cache
def accepted(section: str, key: str, value: Any) -> bool:
    """Whether the configuration has this key and takes this value."""
    sections = {section: {key: value}}
    if value == "trace":
        sections["exit"]["trace_file"] = "trace.json"
    try:
        load_config(overrides=sections)
    except ConfigError:
        return False
    return True


def lookahead_gate() -> tuple[float, ...]:
    """The untrained head of `random_lookahead` in a small model: its weights, then its bias.

    The reference is told which head; what is tested is that the rule uses it as it should.
    """
    from rlt.depth.rules import random_gate

    gate = random_gate(HIDDEN, torch.device("cpu"))
    bias = float(gate(torch.zeros(1, HIDDEN)))
    return (*(gate(torch.eye(HIDDEN)) - bias).tolist(), bias)


def seeded_state(seed: int, position: int) -> torch.Tensor:
    """The start state of one token: the reference is told which; what is tested is who gets it."""
    return initial_state(torch.tensor([seed]), torch.tensor([position]), HIDDEN, "seeded")[0]


def model_name(shape: Shape) -> str:
    return "-".join(map(str, shape))


class Served(NamedTuple):
    """What an engine is set to, as far as answers depend on it."""

    layout: str
    rule: str
    interval: int
    seeded: bool
    warm: bool
    gate: tuple[float, ...] | None


class Asked(NamedTuple):
    """All that an answer may depend on."""

    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    min_loops: int
    max_loops: int
    threshold: float
    end_ids: tuple[int, ...]
    trace: tuple[int, ...] | None
    #: where start states are seeded
    seed: int | None
    penalties: Penalties


class Models:
    """The small checkpoints on disk and their references, and every answer that was asked for before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dense = {shape: DENSE[shape.family](write_model(directory / model_name(shape), shape)) for shape in SHAPES}
        for dense in self.dense.values():
            dense.draw = seeded_state
        (directory / "trace.json").write_text(json.dumps({"depths": TRACE}))
        self.answer = functools.cache(self._answer)

    def engine(self, shape: Shape, sections: dict[str, dict[str, Any]]) -> Engine:
        return Engine(load_config(overrides=tree(shape, self.directory, sections)))

    def _answer(self, shape: Shape, asked: Asked, served: Served) -> Answer:
        gate = served.gate
        return self.dense[shape].generate(
            asked.prompt,
            asked.max_tokens,
            layout=served.layout,
            rule=served.rule,
            interval=served.interval,
            seed=asked.seed if served.seeded else None,
            warm=served.warm,
            threshold=asked.threshold,
            min_loops=asked.min_loops,
            max_loops=asked.max_loops,
            end_ids=asked.end_ids,
            min_tokens=asked.min_tokens,
            trace=asked.trace,
            penalties=asked.penalties,
            gate=gate and (torch.tensor(gate[:-1]), torch.tensor(gate[-1])),
        )


@dataclass
class Seen:
    """One request: what was asked, what must come, and what came."""

    asked: Asked
    params: ResolvedParams
    want: Answer
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finals: int = 0
    aborted: bool = False

    @property
    def live(self) -> bool:
        return not self.finals and not self.aborted

    @property
    def rows(self) -> int:
        """Upper bound of the rows that all its tokens need."""
        return (len(self.asked.prompt) + self.asked.max_tokens) * self.asked.max_loops


class Watched:
    """An engine whose every message and every step is checked."""

    def __init__(self, models: Models, shape: Shape, sections: dict[str, dict[str, Any]]) -> None:
        self.models, self.shape = models, shape
        config = load_config(overrides=tree(shape, models.directory, sections))
        self.engine = Engine(config)
        self.served = Served(
            layout=config.kv.layout,
            rule=exit_rule(config, shape.family),
            interval=config.exit.check_interval,
            seeded=config.model.initial_state == "seeded",
            warm=config.model.warm_start,
            gate=lookahead_gate() if config.exit.rule == "random_lookahead" else None,
        )
        self.pages, self.prefix_cache = config.kv.pages, config.kv.prefix_cache
        self.requests: dict[str, Seen] = {}
        self.steps_left = 50

    def arrive(self, prompt: list[int], stop_at: int | None = None, level: int = NEVER, **asked: Any) -> str | None:
        """Queue a greedy request and return its id; None when it can never fit.

        `stop_at` names as end id the token that would be generated at that index; `level` is a place in `LEVELS`.
        """
        asked["exit_threshold"] = LEVELS[self.served.rule][level]
        if self.shape.family == "nanbeige":
            asked["max_loops"] = asked["min_loops"] = None
        known = set(SamplingParams.__struct_fields__)
        given = {"temperature": 0.0, "ignore_eos": False} | {k: v for k, v in asked.items() if k in known}
        if not self.engine.info.priorities:
            given["priority"] = 0
        try:
            params = resolve(SamplingParams(**given), self.engine.info, len(prompt), random_seed=0)
        except ParamError:
            room = min(self.engine.info.kv_tokens, self.engine.info.max_model_len)
            assert len(prompt) + given["max_tokens"] > room
            return None
        if stop_at is not None:
            tokens = self._answer(prompt, params).tokens
            given["stop_token_ids"] = (tokens[stop_at % len(tokens)],)
            params = resolve(SamplingParams(**given), self.engine.info, len(prompt), random_seed=0)
        name = f"r{len(self.requests)}"
        seen = Seen(self._asked(prompt, params), params, self._answer(prompt, params))
        self.engine.add(name, list(prompt), params)
        self.requests[name] = seen
        # A tick runs at least one row of some request, and no row runs twice; the rest is for ticks that only wait.
        self.steps_left += 2 * seen.rows + 10
        return name

    def _asked(self, prompt: list[int], params: ResolvedParams) -> Asked:
        trace = tuple(TRACE[len(self.requests) % len(TRACE)]) if self.served.rule == "trace" else None
        return Asked(
            prompt=tuple(prompt),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            min_loops=params.min_loops,
            max_loops=params.max_loops,
            threshold=params.exit_threshold,
            end_ids=params.end_token_ids,
            trace=trace,
            seed=params.seed if self.served.seeded else None,
            penalties=Penalties(
                params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.logit_bias
            ),
        )

    def _answer(self, prompt: list[int], params: ResolvedParams) -> Answer:
        return self.models.answer(self.shape, self._asked(prompt, params), self.served)

    def cancel(self, name: str) -> None:
        assert self.engine.abort(name) is self.requests[name].live
        assert self.engine.abort(name) is False
        self.requests[name].aborted = True
        self.engine.scheduler.check_integrity()

    def step(self) -> None:
        self.steps_left -= self.engine.has_work
        for out in self.engine.step():
            self._receive(self.requests[out.request_id], out)
        self.engine.scheduler.check_integrity()
        assert self.steps_left > 0, "too many ticks: a request starves or the engine turns in circles"

    def _receive(self, seen: Seen, out: Tokens) -> None:
        assert seen.live, f"{out.request_id}: a message after the end"
        assert out.error is None
        assert len(out.token_ids) == len(out.depths)
        seen.tokens += out.token_ids
        seen.depths += out.depths
        sure = seen.want.sure(NOISE[self.shape.family])
        got = list(zip(seen.tokens, seen.depths, strict=True))
        want = list(zip(seen.want.tokens, seen.want.depths, strict=True))
        assert got[:sure] == want[: len(got)][:sure], (out.request_id, seen.asked)
        assert out.cached_tokens < len(seen.asked.prompt)
        assert self.prefix_cache or out.cached_tokens == 0
        assert len(seen.tokens) <= seen.asked.max_tokens
        if out.finish_reason is not None:
            seen.finals += 1
            if sure == len(want):
                assert got == want
            stopped = seen.tokens[-1] in seen.asked.end_ids and len(seen.tokens) > seen.asked.min_tokens
            assert out.finish_reason == ("stop" if stopped else "length")
            own = stopped and seen.tokens[-1] in seen.params.stop_token_ids
            assert out.stop_reason == (seen.tokens[-1] if own else None)

    def finish(self) -> None:
        """Run to the end: everybody is answered exactly once, and all pages are back."""
        while self.engine.has_work:
            self.step()
        for _ in range(3):
            assert self.engine.step() == []
        self.engine.scheduler.check_integrity()
        for name, seen in self.requests.items():
            assert seen.finals == (0 if seen.aborted else 1), name
        pages = self.engine.stats().kv_pages
        assert pages["free"] + pages.get("cached", 0) == self.pages, "pages leaked"
        assert self.prefix_cache or pages["free"] == self.pages
