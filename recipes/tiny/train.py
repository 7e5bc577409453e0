"""Train a built-in tiny model, evaluate it and write the folder that the server loads.

    python recipes/tiny/train.py --family ouro

What is trained how is in the family's file under `families/`.
"""

import argparse
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoint import load_model, save_model
from evaluate import Batches, Row, by_loops, by_threshold, heldout_batches, measure, recommended, table
from families import FAMILIES
from families.common import Draws, TinyModel, compile_model
from muon import Muon
from tokenizer import VOCAB_SIZE, Encoder, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from data import Batch, Stream, stream

ROOT = Path(__file__).resolve().parents[2]
WARMUP_STEPS = 200


def train_model(
    model: TinyModel, tokenizer: Tokenizer, batches: Iterator[Batch], probe: Batches, args: argparse.Namespace
) -> None:
    """Muon for the matrices of the layers, AdamW for the rest; short warm-up, then linear decay to zero."""
    matrices = model.matrices()
    taken = {id(p) for p in matrices}
    # By weight decay and share of the learning rate.
    others: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if id(p) not in taken:
            others[0.05 if p.ndim == 2 else 0.0, model.lr_shares.get(name, 1.0)].append(p)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [{"params": ps, "weight_decay": decay, "share": share} for (decay, share), ps in others.items()],
        betas=(0.9, 0.98),
        fused=True,
    )
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    begun = time.perf_counter()
    for step in range(args.steps):
        batch = Batch(*(t.to(args.device, non_blocking=True) for t in next(batches)))
        loss = model.loss(batch, step / args.steps, Draws(generator, Random(f"step/{args.seed}/{step}")))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = args.lr * min((step + 1) / WARMUP_STEPS, 1 - step / args.steps)
        for group in adam.param_groups:
            group["lr"] = lr * group["share"]
        muon.step(lr)
        adam.step()
        adam.zero_grad()
        if (step + 1) % args.log_every == 0:
            # A run that is cut short leaves its last state behind.
            save_model(model, tokenizer, args.out)
            with torch.compiler.set_stance("force_eager"):
                first, last = (measure(model, probe, n).summary() for n in (1, model.loops))
            print(
                f"step {step + 1}: loss {loss.item():.3f}, exact match {first['exact_match_pct']} % with 1 loop,"
                f" {last['exact_match_pct']} % with all, {last['by_task']}, {time.perf_counter() - begun:.0f} s",
                flush=True,
            )


def write_results(path: Path, results: dict[str, Any]) -> None:
    """One line for every setting of the table, so that the file can be read and compared."""

    def lines(value: Any, pad: str) -> str:
        # A setting's scores are the innermost that is spread out.
        if not isinstance(value, dict) or "exact_match_pct" in value:
            return json.dumps(value)
        inner = ",\n".join(f"{pad}  {json.dumps(str(key))}: {lines(item, pad + '  ')}" for key, item in value.items())
        return f"{{\n{inner}\n{pad}}}" if value else "{}"

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(results, "") + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(FAMILIES), default="ouro")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--gate-steps", type=int, default=200, help="steps of the exit gate, where there is one")
    parser.add_argument("--batch-tokens", type=int, default=98304)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--per-task", type=int, default=1000, help="held-out examples of each task in the report")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--log-every", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="default: the built-in model's folder")
    parser.add_argument("--results", type=Path, help="default: recipes/tiny/results/train-tiny-<family>.json")
    parser.add_argument("--quick", action="store_true", help="a few steps that only show that everything runs")
    args = parser.parse_args()
    args.out = args.out or ROOT / f"src/rlt/models/assets/tiny-{args.family}"
    args.results = args.results or ROOT / f"recipes/tiny/results/train-tiny-{args.family}.json"
    if args.quick:
        args.steps, args.gate_steps, args.batch_tokens, args.per_task, args.log_every = 6, 2, 2048, 2, 3
    return args


def main() -> None:
    """Tokenizer, training, thresholds from one held-out seed, report on another."""
    args = parse_args()
    begun = time.perf_counter()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[args.family]
    if args.quick:
        family.rules = {rule: thresholds[-2:] for rule, thresholds in family.rules.items()}
    tokenizer = train_tokenizer(args.seed, family.dialect)
    on_gpu = args.device.startswith("cuda")
    model = family.build(VOCAB_SIZE, torch.bfloat16 if on_gpu else torch.float32).to(args.device)
    save_tokenizer(tokenizer, args.out, model.max_positions, family.dialect)
    if on_gpu:
        compile_model(family)
    dataset = Stream(Encoder(tokenizer), family.dialect, args.seed, args.steps + args.gate_steps, args.batch_tokens)
    batches = stream(dataset, args.workers)
    device = torch.device(args.device)
    validation = heldout_batches(model, tokenizer, max(1, args.per_task // 4), args.seed + 1, device)
    train_model(model, tokenizer, batches, validation, args)
    # What follows is too short to be worth compiling for new shapes and modes.
    torch.compiler.set_stance("force_eager")
    model.second_stage(batches, args.gate_steps, args.device)
    print(f"trained in {time.perf_counter() - begun:.0f} s", flush=True)

    save_model(model, tokenizer, args.out)
    saved = load_model(args.out)[0].to(device)
    best = recommended(by_threshold(saved, validation), measure(saved, validation, saved.loops))
    for each in (model, saved):
        each.recommend(best)
    save_model(model, tokenizer, args.out)
    report = heldout_batches(model, tokenizer, args.per_task, args.seed, device)
    loops, thresholds = by_loops(saved, report), by_threshold(saved, report)
    results = {
        "command": f"python recipes/tiny/train.py --family {args.family} --seed {args.seed} --steps {args.steps}"
        f" --gate-steps {args.gate_steps} --batch-tokens {args.batch_tokens} --lr {args.lr}",
        "seed": args.seed,
        "environment": {
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "minutes": round((time.perf_counter() - begun) / 60, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": args.steps * args.batch_tokens,
        "heldout_examples_per_task": args.per_task,
        "recommended": {rule: summary(q, thresholds[rule][q], loops[saved.loops]) for rule, q in best.items()},
        "by_loops": {n: row.summary() for n, row in loops.items()},
        "by_threshold": {rule: {q: row.summary() for q, row in rows.items()} for rule, rows in thresholds.items()},
    }
    write_results(args.results, results)
    print(table(loops, thresholds))
    print(f"recommended: {results['recommended']}, {results['minutes']} minutes")


def summary(threshold: float, row: Row, full: Row) -> dict[str, object]:
    """What a recommended threshold, chosen on other examples, keeps and saves on those of the report."""
    return {
        "threshold": threshold,
        "kept_pct": round(100 * row.total.exact_match_pct() / max(full.total.exact_match_pct(), 0.01), 2),
        "loops_pct": round(100 * row.total.mean_loops() / full.total.mean_loops(), 2),
    }


if __name__ == "__main__":
    main()
