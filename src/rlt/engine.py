"""The engine: plan a tick, run it, apply what it did. The daemon's engine core and `rlt.LLM` both drive this object."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import torch

from rlt.attention.backends import BACKENDS, choose_backend
from rlt.attention.interface import KvPool
from rlt.config import Config
from rlt.depth.rules import make_rule
from rlt.depth.table import RULES
from rlt.errors import ConfigError, MemoryPlanError
from rlt.exec.memory import plan_pages
from rlt.exec.planes import make_planes
from rlt.exec.runner import Runner, SubmittedTick
from rlt.exec.slots import PageTable, Slots
from rlt.kv.book import PageBook
from rlt.kv.layout import Layout, parse_layout
from rlt.kv.pages import PagePool
from rlt.kv.prefix import PrefixCache
from rlt.models.checkpoint import read_spec
from rlt.models.directory import resolve_model
from rlt.models.families import FAMILIES
from rlt.models.loader import fingerprint
from rlt.models.ops import choose_ops
from rlt.models.registry import load_model
from rlt.models.spec import ModelSpec
from rlt.progress import Progress
from rlt.sched.plan import TickPlan
from rlt.sched.policy import Policy
from rlt.sched.scheduler import Scheduler
from rlt.sched.supply import PageSupply
from rlt.support import check_model_settings, exit_rule
from rlt.synthetic.dummy import dummy_model
from rlt_protocols.engine import EngineStats
from rlt_protocols.params import MAX_STOP_TOKEN_IDS, ModelInfo, ResolvedParams, check_token_ids
from rlt_protocols.text import Tokens


class Engine:
    """One model on one device, and the requests it is working on. Not thread-safe: one thread drives it.

    Raises `ConfigError`, `ModelError` or `MemoryPlanError` when it cannot be built. `progress` follows the loading.
    """

    def __init__(self, config: Config, progress: Progress | None = None) -> None:
        # One core is left to the other processes: a thread that waits for its turn stalls all threads of a tick.
        torch.set_num_threads(config.engine.cpu_threads or max(1, (os.cpu_count() or 1) - 1))
        directory = resolve_model(config.model.path, config.model.revision, config.model.load_format)
        spec = read_spec(directory)
        check_model_settings(config, spec)
        device = choose_device(config.engine.device)
        dtype = choose_dtype(config.model.dtype, device)
        attention = choose_backend("engine.attention", config.engine.attention, device, dtype)
        ops = choose_ops(config.engine.kernels, device, dtype)
        if config.model.load_format == "dummy":
            model = dummy_model(spec, dtype=dtype, device=device, ops=ops, progress=progress)
        else:
            model = load_model(directory, spec, dtype=dtype, device=device, ops=ops, progress=progress)
        layout = parse_layout(config.kv.layout, spec.outer_lists)
        size, rule = config.kv.page_size, exit_rule(config, spec.family)
        pages = plan_pages(config.kv, spec, dtype, device)
        self.info = _model_info(config, spec, directory, layout, pages)
        kv = KvPool(
            layers=spec.layers,
            pages=pages,
            page_size=size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
        )
        engine = config.engine
        slots = Slots(engine.max_seqs, device, end_ids=len(spec.eos_token_ids) + MAX_STOP_TOKEN_IDS)
        places = -(-self.info.max_model_len // size)
        table = PageTable(engine.max_seqs, layout.lists(spec.loops), places, device)
        self.runner = Runner(
            model=model,
            layout=layout,
            pool=kv,
            attention=BACKENDS[attention].make(kv, spec.heads),
            slots=slots,
            pages=table,
            planes=make_planes(layout, slots, table, kv, spec.loops),
            rule=make_rule(rule, config.exit, slots, model),
            prompt_rows=engine.max_tick_tokens,
            initial_state=config.model.initial_state,
            warm_start=config.model.warm_start,
        )
        asynchronous = device.type == "cuda" if engine.async_scheduling is None else engine.async_scheduling
        #: ticks whose results may be unread when the next one is submitted
        self._max_lag = int(asynchronous)
        page_pool = PagePool(pages)
        weights = fingerprint(directory, config.model.load_format)
        prefix = PrefixCache(page_pool, size, weights, layout.name) if config.kv.prefix_cache else None
        self.scheduler = Scheduler(
            Policy(
                max_seqs=engine.max_seqs,
                max_tick_tokens=engine.max_tick_tokens,
                prefill_chunk=engine.prefill_chunk,
                wavefront=not layout.serial_prompt if engine.wavefront is None else engine.wavefront,
                mixed=engine.mixed,
                priority=engine.scheduling == "priority",
                preemption=engine.preemption,
                max_bypass=engine.max_bypass,
                # Without preemption all growth is promised at admission.
                reserve=int(pages * config.kv.watermark) if engine.preemption else 0,
            ),
            PageSupply(
                pool=page_pool,
                prefix=prefix,
                layout=layout,
                book=PageBook(layout, engine.max_seqs, spec.loops, size),
                page_size=size,
                ahead=1 + self._max_lag,
                early_exits=rule == "trace" or RULES[rule].criterion,
                seeded=config.model.initial_state == "seeded",
            ),
        )
        self._submitted: deque[tuple[TickPlan, SubmittedTick]] = deque()
        self._ticks = 0
        self._rows = {"decode": 0, "prefill": 0}
        #: since the last report; without anybody who asks, only the newest are kept
        self._tick_seconds: deque[float] = deque(maxlen=4096)
        self._tokens = 0
        self._token_loops = 0

    def add(self, request_id: str, prompt: list[int], params: ResolvedParams) -> None:
        """Queue a request. `params` come from `rlt_protocols.params.resolve`; a bad token id is a `ParamError`."""
        check_token_ids("prompt", prompt, self.info.vocab_size)
        self.scheduler.add(request_id, prompt, params)

    def abort(self, request_id: str) -> bool:
        """Drop a request; False when it is not here (any more)."""
        return self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> int:
        """Drop the cached blocks that no request reads, between two ticks; returns how many pages that frees."""
        prefix = self.scheduler.supply.prefix
        return prefix.reset() if prefix is not None else 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._submitted)

    def step(self) -> list[Tokens]:
        """Submit one tick and return the tokens of the oldest tick that is due; an idle engine does nothing.

        In asynchronous mode that is the tick before: a tick is planned and submitted while the results of the last
        one are not read yet.
        """
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan:
            self._submitted.append((plan, self.runner.submit(plan)))
            self._ticks += 1
            self._rows["decode"] += len(plan.decode.slots)
            self._rows["prefill"] += plan.prompt_rows
        if not self._submitted or (plan and len(self._submitted) <= self._max_lag):
            return []
        plan, tick = self._submitted.popleft()
        outputs = self.scheduler.apply(plan, tick.read())
        self._tick_seconds.append(time.perf_counter() - start)
        for output in outputs:
            self._tokens += len(output.token_ids)
            self._token_loops += sum(output.depths)
        return outputs

    def check_integrity(self) -> None:
        """Assert that every page, row and slot is where it should be; worth its milliseconds when there is no work."""
        self.scheduler.check_integrity()

    def stats(self, engine: int = 0) -> EngineStats:
        """Gauges and counters since the start; `tick_seconds` since the last call."""
        pool, prefix = self.scheduler.supply.pool, self.scheduler.supply.prefix
        cached = prefix.pages_held if prefix is not None else 0
        ticks = tuple(self._tick_seconds)
        self._tick_seconds.clear()
        return EngineStats(
            engine=engine,
            running=len(self.scheduler.places.running),
            waiting=len(self.scheduler.waiting),
            kv_pages={"free": pool.free, "used": pool.used - cached, "cached": cached},
            ticks=self._ticks,
            tick_rows=dict(self._rows),
            tick_seconds=ticks,
            tokens=self._tokens,
            token_loops=self._token_loops,
        )


def choose_device(name: str | None) -> torch.device:
    """The device that `engine.device` means; None is the first GPU, or the CPU where there is none."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            [f"engine.device {name!r}: this machine has {torch.cuda.device_count()} GPUs that torch can use"]
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where small models run faster in it."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _model_info(config: Config, spec: ModelSpec, directory: Path, layout: Layout, pages: int) -> ModelInfo:
    """The limits and defaults that requests are checked against, from the configuration and the checkpoint."""
    exits, full_depth = config.exit, FAMILIES[spec.family].full_depth
    rule = exit_rule(config, spec.family)
    kind = RULES[rule]
    default = spec.exit_threshold if kind.threshold is None else kind.threshold
    if rule in ("full_depth", "trace"):
        # Nothing compares it; to whoever reads it, it says that no threshold lets a token leave early.
        default = 1.0
    kv_tokens = layout.most_tokens(pages, spec.loops, config.kv.page_size)
    if kv_tokens < 2:
        raise MemoryPlanError(
            f"a KV cache of {pages} pages of {config.kv.page_size} positions cannot hold one request in layout "
            f"{layout.name} (raise kv.pages, kv.bytes or kv.memory_fraction)"
        )
    return ModelInfo(
        name=config.model.served_name or directory.name,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_model_len=config.model.max_model_len or spec.max_positions,
        loops=spec.loops,
        min_loops=exits.min_loops if full_depth is None else spec.loops,
        max_loops=exits.max_loops or spec.loops,
        full_depth=full_depth,
        exit_threshold=default if exits.threshold is None else exits.threshold,
        exit_rule=rule,
        exit_thresholds=kind.thresholds,
        eos_token_ids=spec.eos_token_ids,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        priorities=config.engine.scheduling == "priority",
        kv_tokens=kv_tokens,
    )
