"""The whole engine against the dense reference: whatever happens around a request, it gets the answer of its solo run.

Switches and values that the configuration does not have are left out, so this file grows with the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.small_models import HIDDEN, SHAPES, VOCAB, Shape, write_model
from reference.dense import Answer, DenseOuro
from rlt.config import SECTIONS, load_config
from rlt.engine import Engine
from rlt.errors import ConfigError
from rlt_protocols.params import ParamError, ResolvedParams, SamplingParams, resolve
from rlt_protocols.text import Tokens
from support import resolved, run_to_end

#: Examples of the state machine; `--hypothesis-profile NAME` of a registered profile overrides it.
EXAMPLES = 30
STEPS = 10

LAYOUTS = ("last_exited", "last_exited_copy", "shared", "last_step", "cyclic:1", "cyclic:2", "cyclic:3", "cyclic:5")
RULES = ("ouro", "ouro_delayed", "random_lookahead", "trace")
#: Depths of output tokens by request, for the rule `trace`; some are outside any limits.
TRACE = [[4, 1, 3, 2], [1, 2], [1, 4, 4, 1, 1, 2, 9], [3], [2, 1, 1]]

# -- what the engine has ---------------------------------------------------------------------------------------------


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


def those_accepted(section: str, key: str, values: tuple[Any, ...]) -> Any:
    """A strategy for the values that exist; a key that does not exist is dropped in `tree` whatever is drawn."""
    return st.sampled_from([value for value in values if accepted(section, key, value)] or values)


def lookahead_gate() -> tuple[float, ...]:
    """The untrained head of `random_lookahead` in a small model: its weights, then its bias.

    The reference is told which head; what is tested is that the rule uses it as it should.
    """
    from rlt.depth.rules import random_gate

    gate = random_gate(HIDDEN, torch.device("cpu"))
    bias = float(gate(torch.zeros(1, HIDDEN)))
    return (*(gate(torch.eye(HIDDEN)) - bias).tolist(), bias)


def model_name(shape: Shape) -> str:
    return "-".join(map(str, shape))


class Models:
    """The small checkpoints on disk and their references, and every answer that was asked for before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dense = {shape: DenseOuro(write_model(directory / model_name(shape), shape)) for shape in SHAPES}
        (directory / "trace.json").write_text(json.dumps({"depths": TRACE}))
        self.answer = functools.cache(self._answer)

    def engine(self, shape: Shape, sections: dict[str, dict[str, Any]]) -> Engine:
        return Engine(load_config(overrides=tree(shape, self.directory, sections)))

    def _answer(
        self, shape: Shape, asked: Asked, layout: str, rule_name: str, gate: tuple[float, ...] | None
    ) -> Answer:
        return self.dense[shape].generate(
            asked.prompt,
            asked.max_tokens,
            layout=layout,
            rule=rule_name,
            threshold=asked.threshold,
            min_loops=asked.min_loops,
            max_loops=asked.max_loops,
            end_ids=asked.end_ids,
            min_tokens=asked.min_tokens,
            trace=asked.trace,
            gate=gate and (torch.tensor(gate[:-1]), torch.tensor(gate[-1])),
        )


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- an engine under observation -------------------------------------------------------------------------------------


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
        self.layout, self.rule = config.kv.layout, config.exit.rule
        self.pages, self.prefix_cache = config.kv.pages, getattr(config.kv, "prefix_cache", False)
        self.gate = lookahead_gate() if self.rule == "random_lookahead" else None
        self.requests: dict[str, Seen] = {}
        self.steps_left = 50

    def arrive(self, prompt: list[int], stop_at: int | None = None, **asked: Any) -> str | None:
        """Queue a greedy request and return its id; None when it can never fit.

        `stop_at` names as end id the token that would be generated at that index.
        """
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
        trace = tuple(TRACE[len(self.requests) % len(TRACE)]) if self.rule == "trace" else None
        return Asked(
            prompt=tuple(prompt),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            min_loops=params.min_loops,
            max_loops=params.max_loops,
            threshold=params.exit_threshold,
            end_ids=params.end_token_ids,
            trace=trace,
        )

    def _answer(self, prompt: list[int], params: ResolvedParams) -> Answer:
        return self.models.answer(self.shape, self._asked(prompt, params), self.layout, self.rule, self.gate)

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
        sure = seen.want.sure()
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


# -- any mix of everything -------------------------------------------------------------------------------------------

_random = random.Random(3)
#: prompts are a piece of one of these and a piece of another, so that many share a prefix and some part in a page
TEXTS = [[_random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
KEEP = (8, 3, 0, 12, 16, 17, 24, 33)


def prompt_of(base: int, keep: int, other: int, extra: int) -> list[int]:
    return TEXTS[base][:keep] + TEXTS[other][:extra] or TEXTS[base][:1]


switches = st.fixed_dictionaries(
    {
        "engine": st.fixed_dictionaries(
            {
                "wavefront": those_accepted("engine", "wavefront", (None, True, False)),
                "mixed": st.booleans(),
                "async_scheduling": st.booleans(),
                "preemption": st.booleans(),
                "scheduling": st.sampled_from(["fcfs", "priority"]),
                "max_bypass": st.sampled_from([0, 1, 64]),
                "prefill_chunk": st.integers(1, 16),
            }
        ),
        "kv": st.fixed_dictionaries(
            {
                "layout": those_accepted("kv", "layout", LAYOUTS),
                "prefix_cache": st.booleans(),
                "page_size": st.sampled_from([2, 4, 1, 3, 7, 8, 16]),
                "watermark": st.sampled_from([0.0, 0.0, 0.01, 0.25]),
            }
        ),
        "exit": st.fixed_dictionaries({"rule": those_accepted("exit", "rule", RULES)}),
    }
)

requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(prompt_of, st.integers(0, 1), st.sampled_from(KEEP), st.integers(0, 2), st.integers(0, 9)),
        "max_tokens": st.sampled_from([12, 8, 16, 24, 1, 2, 3, 5]),
        "min_tokens": st.sampled_from([0, 0, 0, 1, 3]),
        "stop_at": st.sampled_from([None, None, None, None, 0, 2, 5]),
        "max_loops": st.sampled_from([4, 4, 4, 4, 3, 2, 1]),
        "min_loops": st.sampled_from([1, 1, 2, 3]),
        "exit_threshold": st.sampled_from([0.5, 0.5, 0.3, 0.8, 0.0, 1.0]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, None, None, "a", "b"]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go, and the engine steps; the checks are those of `Watched`."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.models = models
        self.watched: Watched | None = None

    @initialize(
        shape=st.sampled_from(SHAPES),
        sections=switches,
        max_seqs=st.sampled_from([3, 4, 6, 2, 1]),
        more_rows=st.integers(0, 20),
        kv_tokens=st.sampled_from([30, 36, 42, 50, 60, 20]),
        first=st.lists(requests, min_size=3, max_size=6),
    )
    def start(self, shape, sections, max_seqs, more_rows, kv_tokens, first):
        sections["engine"] |= {"max_seqs": max_seqs, "max_tick_tokens": max_seqs + more_rows}
        sections["kv"]["pages"] = (-(-kv_tokens // sections["kv"]["page_size"]) + 2) * shape.loops
        try:
            self.watched = Watched(self.models, shape, sections)
        except ConfigError as error:
            event(f"refused: {error}")
            reject()
        self.loops = shape.loops
        self.failed = False
        self.arrive(first)

    def checked(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # `teardown` runs after a failure too; it must not hide it behind another one.
        self.failed = True
        act(*args, **kwargs)
        self.failed = False

    @rule(batch=st.lists(requests, min_size=1, max_size=2))
    def arrive(self, batch):
        for asked in batch:
            limits = {
                "max_loops": min(asked["max_loops"], self.loops),
                "min_loops": min(asked["min_loops"], asked["max_loops"], self.loops),
                "min_tokens": min(asked["min_tokens"], asked["max_tokens"]),
            }
            self.checked(self.watched.arrive, **asked | limits)

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def cancel(self, data):
        self.checked(self.watched.cancel, data.draw(st.sampled_from(self.live)))

    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count):
        for _ in range(count):
            self.checked(self.watched.step)

    @property
    def live(self) -> list[str]:
        return [name for name, seen in self.watched.requests.items() if seen.live] if self.watched else []

    def teardown(self):
        if self.watched is not None and not self.failed:
            self.watched.finish()


def examples() -> int:
    """`EXAMPLES`, or what a profile other than the built-in ones says."""
    built_in = settings.get_current_profile_name() in ("default", "ci")
    return EXAMPLES if built_in else settings.default.max_examples


def test_every_request_gets_the_answer_of_its_solo_run(models: Models):
    run_state_machine_as_test(
        lambda: EngineMachine(models),
        settings=settings(
            max_examples=examples(),
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


# -- the same, readable ----------------------------------------------------------------------------------------------

LONG, MIDDLE, SHORT = TEXTS[0][:33], TEXTS[1][:14], TEXTS[2][:1]


def needs(section: str, **values: Any) -> None:
    for key, value in values.items():
        if not accepted(section, key, value):
            pytest.fail(f"{section}.{key} = {value!r} is gone from the configuration: this test would show nothing")


@pytest.mark.parametrize("shape", SHAPES[:2], ids=model_name)
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_and_rule(models: Models, layout, rule_name, shape):
    needs("kv", layout=layout)
    needs("exit", rule=rule_name)
    watched = Watched(
        models,
        shape,
        {
            "engine": {"max_seqs": 3, "max_tick_tokens": 24, "prefill_chunk": 9},
            "kv": {"layout": layout, "page_size": 4, "pages": 200},
            "exit": {"rule": rule_name},
        },
    )
    for prompt in (LONG, MIDDLE, SHORT):
        watched.arrive(prompt, max_tokens=12, exit_threshold=0.5)
        watched.step()
    watched.finish()
    used = {depth for seen in watched.requests.values() for depth in seen.depths}
    assert len(used) > 1, "nothing left early: this shows nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("switch", ["wavefront", "mixed", "async_scheduling", "preemption"])
@pytest.mark.parametrize("value", [False, True])
def test_each_switch_alone(models: Models, layout, switch, value):
    needs("kv", layout=layout)
    needs("engine", **{switch: value})
    sections = {
        "engine": {"max_seqs": 3, "max_tick_tokens": 16, "prefill_chunk": 5, switch: value},
        "kv": {"layout": layout, "page_size": 4, "pages": 80, "prefix_cache": False},
    }
    if (layout, switch, value) == ("shared", "wavefront", True):
        with pytest.raises(ConfigError, match="one plane for all loops"):
            Watched(models, SHAPES[0], sections)
        return
    watched = Watched(models, SHAPES[0], sections)
    for prompt in (LONG, MIDDLE, SHORT, LONG[:20], MIDDLE[:9]):
        watched.arrive(prompt, max_tokens=8, exit_threshold=0.5)
    watched.finish()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prefix_cache_changes_no_result(models: Models, layout):
    needs("kv", layout=layout, prefix_cache=True)
    watched = Watched(
        models,
        SHAPES[0],
        {
            "engine": {"max_seqs": 2, "max_tick_tokens": 16, "prefill_chunk": 7},
            "kv": {"layout": layout, "page_size": 4, "pages": 80, "prefix_cache": True},
        },
    )
    same, extended, parted = LONG[:24], LONG[:31], LONG[:14] + MIDDLE[:10]
    for prompt in (same, same, extended, parted, MIDDLE, LONG, same):
        for salt in (None, "salt"):
            watched.arrive(prompt, max_tokens=6, exit_threshold=0.5, cache_salt=salt)
        watched.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_too_small_for_all(models: Models, layout, scheduling, asynchronous):
    """Each request alone fits and grows to nearly all pages; whoever is suspended goes on as if nothing had been."""
    needs("kv", layout=layout)
    needs("engine", scheduling=scheduling, async_scheduling=asynchronous, preemption=True)
    watched = Watched(
        models,
        SHAPES[0],
        {
            "engine": {
                "max_seqs": 8,
                "max_tick_tokens": 16,
                "prefill_chunk": 4,
                "preemption": True,
                "scheduling": scheduling,
                "async_scheduling": asynchronous,
            },
            "kv": {"layout": layout, "page_size": 2, "pages": 60, "prefix_cache": False, "watermark": 0.0},
        },
    )
    for index, prompt in enumerate(
        (MIDDLE[:6], MIDDLE[6:], SHORT, LONG[:9], LONG[9:14], LONG[14:20], SHORT, MIDDLE[:8])
    ):
        watched.arrive(prompt, max_tokens=16, exit_threshold=0.8, priority=-index, ignore_eos=True)
        watched.step()
    watched.finish()
    assert watched.engine.scheduler.preemptions > 0, "everything fitted: this shows nothing"


def test_sampled_requests_are_their_solo_runs(models: Models):
    """The reference is greedy; that draws depend on the seed and the position alone is seen against solo engines."""
    small = {"engine": {"max_seqs": 3, "max_tick_tokens": 7, "prefill_chunk": 4}, "kv": {"page_size": 2, "pages": 120}}
    together, alone = models.engine(SHAPES[0], small), models.engine(SHAPES[0], small)
    asked = [{"seed": seed, "temperature": 1.0, "max_tokens": 12, "exit_threshold": 0.5} for seed in range(6)]
    prompts = [LONG[: 3 * index + 1] for index in range(6)]
    for index, prompt in enumerate(prompts):
        together.add(str(index), prompt, resolved(together, prompt, **asked[index]))
    done = run_to_end(together)
    for index, prompt in enumerate(prompts):
        alone.add("solo", prompt, resolved(alone, prompt, **asked[index]))
        solo = run_to_end(alone)["solo"]
        assert (done[str(index)].tokens, done[str(index)].depths) == (solo.tokens, solo.depths)


def test_limits_are_each_requests_own(models: Models):
    watched = Watched(models, SHAPES[0], {"engine": {"max_seqs": 12}, "kv": {"pages": 400, "page_size": 4}})
    for low, high in ((1, 4), (2, 4), (4, 4), (1, 3), (3, 3), (1, 1)):
        for threshold in (0.0, 0.5, 1.0):
            name = watched.arrive(
                MIDDLE, max_tokens=10, min_loops=low, max_loops=high, exit_threshold=threshold, min_tokens=10
            )
            assert name is not None
    watched.finish()
    for seen in watched.requests.values():
        assert seen.depths[0] == seen.asked.max_loops
        assert all(seen.asked.min_loops <= depth <= seen.asked.max_loops for depth in seen.depths)


def test_the_comparison_can_fail(models: Models):
    """Negative control: the engine's answers are not those of another layout, rule or threshold."""
    watched = Watched(models, SHAPES[0], {"engine": {"max_seqs": 2}, "kv": {"pages": 200, "page_size": 4}})
    name = watched.arrive(LONG, max_tokens=10, exit_threshold=0.5)
    watched.finish()
    seen = watched.requests[name]
    assert seen.want.sure() == len(seen.want.tokens)
    dense = models.dense[SHAPES[0]]
    for wrong in (
        {"layout": "shared"},
        {"layout": "last_step"},
        {"layout": "cyclic:2"},
        {"rule": "ouro_delayed"},
        {"threshold": 1.0},
        {"min_loops": 2},
        {"max_loops": 3},
    ):
        other = dense.generate(LONG, 10, **{"threshold": 0.5} | wrong)
        assert (other.tokens, other.depths) != (seen.tokens, seen.depths), wrong
