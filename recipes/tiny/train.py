"""Train a built-in tiny model, evaluate it and write a folder that the server loads.

    python recipes/tiny/train.py --family ouro --device cuda

Stage I trains the whole model on the expected loss under the exit distribution with an entropy bonus; stage II freezes
it and trains the exit gate alone to tell whether going on would still lower the loss.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from data import Batch, Stream, stream
from evaluate import full_table, heldout_batches, load, measure, recommended_threshold
from muon import Muon
from model import Ouro, OuroShape, exit_probabilities, ouro_config
from tokenizer import save_tokenizer, train_tokenizer

AUX = float(os.environ.get("AUX", "0"))
PROMPT_WEIGHT = 0.01
"""Weight of a prompt token's loss beside an answer token's 1: enough for text that reads like the tasks."""
DEPTH_WEIGHT = 0.3
"""Weight of the last loop's own loss on top of the expected loss, so that full depth is never starved."""
EARLY_EXIT_ROWS = 0.5
"""Share of rows whose answer tokens stop at random loops, as they will when serving."""
SHARD_BYTES = 3_900_000


def token_losses(model: Ouro, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy [loops, B, S] of every loop's prediction."""
    return torch.stack([
        F.cross_entropy(model.logits(h).float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        for h in hidden
    ])


def stage_one_loss(losses: Tensor, gate: Tensor, weight: Tensor, beta: float) -> Tensor:
    """Expected loss under the exit distribution, minus `beta` times its entropy, plus the last loop's loss."""
    p = exit_probabilities(gate)
    entropy = -(p * (p + 1e-9).log()).sum(0)
    per_token = (p * losses).sum(0) - beta * entropy + DEPTH_WEIGHT * losses[-1] + AUX * losses.mean(0)
    return (per_token * weight).sum() / weight.sum()


def gate_loss(losses: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Match 1 - hazard of each loop but the last to the label sigmoid(50 * (improvement - 0.005)).

    The improvement of loop t is what the best of the later loops would still gain.
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


def train_stage_one(model: Ouro, batches: Iterator[Batch], args: argparse.Namespace, probe: list) -> None:
    """Muon for the matrices of the layers, AdamW for the rest; linear warm-up, then linear decay to zero."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = Muon(matrices)
    rest_groups = [{"params": [p for p in rest if p.ndim == 2]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(rest_groups, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=args.device == "cuda")
    warmup = max(1, min(200, args.steps // 10))
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    loss_of = model.compiled_losses
    start = time.perf_counter()
    for step in range(args.steps):
        tokens, answer = (t.to(args.device, non_blocking=True) for t in next(batches))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        weight = torch.where(answer[:, 1:], 1.0, PROMPT_WEIGHT)
        exits = RandomExit(answer[:, :-1], model.shape.loops, generator) if args.sim else None
        trace = model(inputs, exits=exits)
        beta = 0.1 if step < args.steps // 2 else 0.05
        loss = stage_one_loss(loss_of(trace.hidden, targets), trace.gate, weight, beta)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = args.lr * min((step + 1) / warmup, (args.steps - step) / (args.steps - warmup + 1))
        for group in adam.param_groups:
            group["lr"] = lr
        muon.step(lr)
        adam.step()
        adam.zero_grad()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            with torch.compiler.set_stance("force_eager"):
                scores = [measure(model, probe, n, 1.0) for n in (1, 2, model.shape.loops)]
            parts = {k[5:]: v["exact_match_pct"] for k, v in scores[2]["parts"].items() if k.startswith(("task", "level hops", "level chains"))}
            print(f"step {step + 1} loss {loss.item():.3f} {time.perf_counter() - start:.0f}s", scores[0]["exact_match_pct"], scores[1]["exact_match_pct"], scores[2]["exact_match_pct"], parts, flush=True)


def train_gate(model: Ouro, batches: Iterator[Batch], steps: int, device: str) -> None:
    """Stage II: the gate alone, on answer tokens."""
    gate = model.model.early_exit_gate
    optimizer = torch.optim.AdamW(gate.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        tokens, answer = (t.to(device) for t in next(batches))
        with torch.no_grad():
            hidden = model(tokens[:, :-1]).hidden
            losses = model.compiled_losses(hidden, tokens[:, 1:])
        loss = gate_loss(losses, model.gate(hidden), answer[:, 1:].float())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()


def save_model(model: Ouro, folder: Path, threshold: float) -> None:
    """bf16 weights in shards of less than 4 MB, with index, config and generation config."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in model.state_dict().items():
        data = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if data.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = data
        room -= data.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", ouro_config(model.shape, threshold))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0},
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=["ouro"], default="ouro")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--gate-steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path, default=Path("out/tiny-ouro"))
    parser.add_argument("--log-every", type=int, default=500)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--sim", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--per-task", type=int, default=1000)
    args = parser.parse_args()
    begun = time.perf_counter()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.seed)
    shape = OuroShape(vocab_size=tokenizer.get_vocab_size(), layers=args.layers, heads=args.heads)
    model = Ouro(shape, torch.bfloat16 if args.device == "cuda" else torch.float32).to(device)
    model.compiled_losses = lambda h, t: token_losses(model, h, t)
    if args.device == "cuda":
        torch._dynamo.config.cache_size_limit = 64
        from model import Layer
        Layer.forward = torch.compile(Layer.forward, dynamic=False)
        compiled = torch.compile(token_losses, dynamic=False)
        model.compiled_losses = lambda h, t: compiled(model, h, t)
    save_tokenizer(tokenizer, args.out, shape.max_positions)
    total = args.steps + args.gate_steps
    batches = stream(Stream(tokenizer, args.seed, total, args.batch_tokens), args.workers)
    print(sum(p.numel() for p in model.parameters()), "parameters")
    train_stage_one(model, batches, args, heldout_batches(tokenizer, 100, args.seed + 1, device))
    train_gate(model, batches, args.gate_steps, args.device)
    print("trained", time.perf_counter() - begun, flush=True)
    save_model(model, args.out, 1.0)
    torch.compiler.set_stance("force_eager")
    validation = full_table(model, heldout_batches(tokenizer, args.per_task // 2, args.seed + 1, device))
    q = recommended_threshold(validation["by_threshold"])
    for k, d in validation.items():
        for n, row in d.items():
            print(k, n, row["exact_match_pct"], row["mean_loops"], row["mean_loops_after_first"], {k[5:]: v["exact_match_pct"] for k, v in row["parts"].items() if k.startswith("task")})
    print({k: v["exact_match_pct"] for k, v in validation["by_loops"]["4"]["parts"].items()})
    print({k: v["exact_match_pct"] for k, v in validation["by_loops"]["1"]["parts"].items()})
    print("q", q, "total", time.perf_counter() - begun)
    save_model(model, args.out, q)


if __name__ == "__main__":
    main()
