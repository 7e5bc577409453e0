"""Train a built-in tiny model, evaluate it and write the folder that the server loads.

    python recipes/tiny/train.py --family ouro

Stage I trains the whole model on the expected loss under the exit distribution with an entropy bonus; stage II freezes
it and trains the exit gate alone to tell whether going on would still lower the loss.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from evaluate import Batches, by_loops, by_threshold, heldout_batches, load, measure, recommended_threshold, table
from model import Ouro, OuroShape, compile_layers, exit_probabilities, ouro_config
from muon import Muon
from safetensors.torch import save_file
from tokenizer import save_tokenizer, train_tokenizer
from torch import Tensor

from data import Batch, Stream, stream

ROOT = Path(__file__).resolve().parents[2]
PROMPT_WEIGHT = 0.01
"""Weight of a prompt token's loss beside an answer token's 1: enough for text that reads like the tasks."""
LAST_LOOP_WEIGHT = 0.3
"""Weight of the last loop's own loss on top of the expected loss, so that full depth is never starved."""
EVERY_LOOP_WEIGHT = 0.15
"""Weight of the mean loss of all loops, so that early loops answer what they can and easy tokens may stop there."""
EARLY_EXIT_ROWS = 0.5
"""Share of rows whose answer tokens stop at random loops, as they will when serving."""
WARMUP_STEPS = 200
SHARD_BYTES = 3_900_000

LossesOf = Callable[[Ouro, Tensor, Tensor], Tensor]


def token_losses(model: Ouro, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy [loops, B, S] of every loop's prediction from hidden [loops, B, S, H]."""
    losses = []
    for h in hidden:
        logits = model.logits(h).float().flatten(0, 1)
        losses.append(F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets))
    return torch.stack(losses)


def stage_one_loss(losses: Tensor, gate: Tensor, weight: Tensor, beta: float) -> Tensor:
    """Expected loss under the exit distribution, minus `beta` times its entropy, plus the two small direct terms."""
    p = exit_probabilities(gate)
    entropy = -(p * (p + 1e-9).log()).sum(0)
    expected = (p * losses).sum(0) - beta * entropy
    per_token = expected + LAST_LOOP_WEIGHT * losses[-1] + EVERY_LOOP_WEIGHT * losses.mean(0)
    return (per_token * weight).sum() / weight.sum()


def gate_loss(losses: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Match 1 - hazard of each loop but the last to the label sigmoid(50 * (improvement - 0.005)).

    The improvement of a loop is what the best of the later loops would still gain.
    """
    best_later = losses.flip(0).cummin(0).values.flip(0)[1:]
    go_on = torch.sigmoid(50 * (losses[:-1] - best_later - 0.005))
    per_token = F.binary_cross_entropy_with_logits(gate[:-1], 1 - go_on, reduction="none").mean(0)
    return (per_token * weight).sum() / weight.sum()


class RandomExit:
    """Answer tokens of some rows stop at a random loop, so that deeper loops learn to read earlier keys."""

    def __init__(self, answer: Tensor, loops: int, generator: torch.Generator) -> None:
        rows = torch.rand((len(answer), 1), device=answer.device, generator=generator) < EARLY_EXIT_ROWS
        drawn = torch.randint(1, loops + 1, answer.shape, device=answer.device, generator=generator)
        self.loops = torch.where(rows & answer, drawn, loops)

    def __call__(self, done: int, gate: Tensor) -> Tensor:
        return self.loops <= done


def train_model(
    model: Ouro, losses_of: LossesOf, batches: Iterator[Batch], probe: Batches, args: argparse.Namespace
) -> None:
    """Stage I: Muon for the matrices of the layers, AdamW for the rest; short warm-up, then linear decay to zero."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "layers" not in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim == 2], "weight_decay": 0.05},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        fused=True,
    )
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    begun = time.perf_counter()
    for step in range(args.steps):
        tokens, answer = (t.to(args.device, non_blocking=True) for t in next(batches))
        weight = torch.where(answer[:, 1:], 1.0, PROMPT_WEIGHT)
        trace = model(tokens[:, :-1], exits=RandomExit(answer[:, :-1], model.shape.loops, generator))
        beta = 0.1 if step < args.steps // 2 else 0.05
        loss = stage_one_loss(losses_of(model, trace.hidden, tokens[:, 1:]), trace.gate, weight, beta)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = args.lr * min((step + 1) / WARMUP_STEPS, 1 - step / args.steps)
        for group in adam.param_groups:
            group["lr"] = lr
        muon.step(lr)
        adam.step()
        adam.zero_grad()
        if (step + 1) % args.log_every == 0:
            # A run that is cut short leaves its last state behind.
            save_model(model, args.out, 1.0)
            with torch.compiler.set_stance("force_eager"):
                first, last = (measure(model, probe, n).summary() for n in (1, model.shape.loops))
            print(
                f"step {step + 1}: loss {loss.item():.3f}, exact match {first['exact_match_pct']} % with 1 loop,"
                f" {last['exact_match_pct']} % with all, {last['by_task']}, {time.perf_counter() - begun:.0f} s",
                flush=True,
            )


def train_gate(model: Ouro, batches: Iterator[Batch], steps: int, device: str, lr: float = 1e-2) -> None:
    """Stage II: the gate alone, on answer tokens, everything else frozen."""
    optimizer = torch.optim.AdamW(model.model.early_exit_gate.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        tokens, answer = (t.to(device, non_blocking=True) for t in next(batches))
        with torch.no_grad():
            hidden = model(tokens[:, :-1]).hidden
            losses = token_losses(model, hidden, tokens[:, 1:])
        torch.autograd.backward(gate_loss(losses, model.gate(hidden), answer[:, 1:].float()))
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()


def save_model(model: Ouro, folder: Path, threshold: float) -> None:
    """bf16 weights in shards of less than 4 MB, with index, config and generation config."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in model.state_dict().items():
        data = tensor.to("cpu", torch.bfloat16).contiguous()
        if data.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = data
        room -= data.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", ouro_config(model.shape, threshold))
    generation = {"bos_token_id": 1, "do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(folder / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_results(path: Path, results: dict[str, Any]) -> None:
    """One line for every setting of the table, so that the file can be read and compared."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict):
            return json.dumps(value)
        pad = " " * (2 * (3 - depth))
        inner = ",\n".join(f"{pad}{json.dumps(str(key))}: {lines(item, depth - 1)}" for key, item in value.items())
        return f"{{\n{inner}\n{pad[2:]}}}"

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(results, 2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["ouro"], default="ouro")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--gate-steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=98304)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--per-task", type=int, default=1000, help="held-out examples of each task in the report")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--log-every", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=ROOT / "src/rlt/models/assets/tiny-ouro")
    parser.add_argument("--results", type=Path, default=ROOT / "recipes/tiny/results/train-tiny-ouro.json")
    parser.add_argument("--quick", action="store_true", help="a few steps that only show that everything runs")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.gate_steps, args.batch_tokens, args.per_task, args.log_every = 6, 2, 2048, 4, 3
    return args


def main() -> None:
    """Tokenizer, stage I, stage II, threshold from one held-out seed, report on another."""
    args = parse_args()
    begun = time.perf_counter()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.seed)
    shape = OuroShape(vocab_size=tokenizer.get_vocab_size())
    save_tokenizer(tokenizer, args.out, shape.max_positions)
    on_gpu = args.device.startswith("cuda")
    model = Ouro(shape, torch.bfloat16 if on_gpu else torch.float32).to(args.device)
    losses_of: LossesOf = token_losses
    if on_gpu:
        compile_layers()
        losses_of = torch.compile(token_losses, dynamic=False)
    batches = stream(Stream(tokenizer, args.seed, args.steps + args.gate_steps, args.batch_tokens), args.workers)
    device = torch.device(args.device)
    validation = heldout_batches(tokenizer, args.per_task // 4, args.seed + 1, device)
    train_model(model, losses_of, batches, validation, args)
    # What follows is too short to be worth compiling for new shapes and modes.
    torch.compiler.set_stance("force_eager")
    train_gate(model, batches, args.gate_steps, args.device)
    print(f"trained in {time.perf_counter() - begun:.0f} s", flush=True)

    save_model(model, args.out, 1.0)
    saved = load(args.out)[0].to(device)
    threshold = recommended_threshold(by_threshold(saved, validation))
    save_model(model, args.out, threshold)
    report = heldout_batches(tokenizer, args.per_task, args.seed, device)
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
        "early_exit_threshold": threshold,
        "by_loops": {n: row.summary() for n, row in loops.items()},
        "by_threshold": {q: row.summary() for q, row in thresholds.items()},
    }
    write_results(args.results, results)
    print(table(loops, thresholds))
    print(f"recommended threshold {threshold}, {results['minutes']} minutes")


if __name__ == "__main__":
    main()
