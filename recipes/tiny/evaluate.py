"""Exact match by number of loops and by exit threshold, with the exit semantics of the server.

Greedy decoding gives exactly the expected text if and only if, fed the expected text, the model ranks every one of its
tokens first. So one parallel pass measures what generation would give. Early exits keep that equality: the exit of a
token depends only on earlier ones, and a token that stopped at loop e shows loop d its keys of loop min(d, e).
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from model import Ouro, OuroShape
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from data import Batch, Piece, chat_form, pad, raw_form
from rlt.evals.tasks import SYSTEM_PROMPTS, examples

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCH = 250


@dataclass(slots=True)
class Score:
    """Counts over examples; the first answer token of each always runs every loop."""

    depth: int
    right: int = 0
    seen: int = 0
    loops: int = 0
    tokens: int = 0

    def add(self, right: bool, loops: int, tokens: int) -> None:
        """One example: exact match, loops spent on its answer tokens and their number."""
        self.right += right
        self.seen += 1
        self.loops += loops
        self.tokens += tokens

    def exact_match_pct(self) -> float:
        return round(100 * self.right / self.seen, 2)

    def mean_loops(self) -> float:
        return round(self.loops / self.tokens, 3)

    def mean_loops_after_first(self) -> float:
        return round((self.loops - self.depth * self.seen) / (self.tokens - self.seen), 3)


@dataclass(slots=True)
class Row:
    """The scores of one setting: over everything, and for every part (kind, name) of the examples."""

    total: Score
    parts: dict[tuple[str, str], Score]

    def summary(self) -> dict[str, object]:
        """Plain numbers for the results file; parts as {kind: {name: [exact match in %, mean loops]}}."""
        kinds: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for (kind, name), score in sorted(self.parts.items()):
            kinds[kind][name] = [score.exact_match_pct(), score.mean_loops()]
        return {
            "exact_match_pct": self.total.exact_match_pct(),
            "mean_loops": self.total.mean_loops(),
            "mean_loops_after_first": self.total.mean_loops_after_first(),
            **kinds,
        }


Part = tuple[str, str]
Batches = list[tuple[Batch, list[list[Part]]]]


class HazardExit:
    """Stop a decode token at the first loop whose accumulated exit probability reaches `threshold`."""

    def __init__(self, may_exit: Tensor, threshold: float, depth: int) -> None:
        self.may_exit = may_exit
        self.threshold = threshold
        self.loops = torch.full(may_exit.shape, depth, device=may_exit.device)

    def __call__(self, done: int, gate: Tensor) -> Tensor:
        cdf = 1 - torch.prod(1 - torch.sigmoid(gate), dim=0)
        running = self.loops >= done
        now = self.may_exit & running & (cdf >= self.threshold) & (self.threshold < 1)
        self.loops = torch.where(now, done, self.loops)
        return self.loops <= done


@torch.no_grad()
def run_batch(model: Ouro, batch: Batch, loops: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per example: exact match, loops spent on its answer tokens, number of answer tokens. Each [B]."""
    tokens, answer = batch
    inputs, targets, wanted = tokens[:, :-1], tokens[:, 1:], answer[:, 1:]
    # A decode token is an answer token that is fed back; the prompt, its last token included, runs every loop.
    exits = HazardExit(answer[:, :-1], threshold, loops)
    hidden = model(inputs, loops=loops, exits=exits).hidden
    index = (exits.loops - 1)[None, :, :, None].expand(1, -1, -1, hidden.shape[-1])
    guess = model.logits(hidden.gather(0, index)[0]).argmax(-1)
    right = ((guess == targets) | ~wanted).all(dim=1)
    return right, (exits.loops * wanted).sum(dim=1), wanted.sum(dim=1)


def heldout_batches(tokenizer: Tokenizer, per_task: int, seed: int, device: torch.device) -> Batches:
    """Every example once raw and once as a chat turn (half of those with a system message), with its parts."""
    rng = Random(f"forms/{seed}")
    rows: list[tuple[list[Piece], list[Part]]] = []
    for e in examples("heldout", per_task, seed):
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else None
        parts = [("by_task", e.task), ("by_level", f"{e.task} {e.difficulty}")]
        rows.append((raw_form(e), [*parts, ("by_form", "raw")]))
        rows.append((chat_form(e, system), [*parts, ("by_form", "chat")]))
    rows.sort(key=lambda row: sum(len(piece.text) for piece in row[0]))
    batches: Batches = []
    for at in range(0, len(rows), BATCH):
        chunk = rows[at : at + BATCH]
        batch = pad([pieces for pieces, _ in chunk], tokenizer)
        batches.append((Batch(batch.tokens.to(device), batch.answer.to(device)), [parts for _, parts in chunk]))
    return batches


def measure(model: Ouro, batches: Batches, loops: int, threshold: float = 1.0) -> Row:
    """The scores of one setting: `loops` for everything, exits at `threshold` (1.0: never)."""
    row = Row(Score(loops), defaultdict(lambda: Score(loops)))
    for batch, parts in batches:
        counts = (t.tolist() for t in run_batch(model, batch, loops, threshold))
        for right, spent, tokens, names in zip(*counts, parts, strict=True):
            row.total.add(right, spent, tokens)
            for name in names:
                row.parts[name].add(right, spent, tokens)
    return row


def by_loops(model: Ouro, batches: Batches) -> dict[int, Row]:
    """Prompt and decode alike run that many loops."""
    return {n: measure(model, batches, n) for n in range(1, model.shape.loops + 1)}


def by_threshold(model: Ouro, batches: Batches) -> dict[float, Row]:
    """Decode tokens stop early, the prompt runs every loop."""
    return {q: measure(model, batches, model.shape.loops, q) for q in THRESHOLDS}


def recommended_threshold(rows: dict[float, Row], keep: float = 0.995) -> float:
    """The threshold with the fewest loops that keeps at least `keep` of the full-depth exact match."""
    full = rows[1.0].total.exact_match_pct()
    good = [q for q, row in rows.items() if row.total.exact_match_pct() >= keep * full]
    return min(good, key=lambda q: rows[q].total.mean_loops())


def table(loops: dict[int, Row], thresholds: dict[float, Row]) -> str:
    """A Markdown table: exact match by task for every setting."""
    tasks = sorted({name for kind, name in loops[1].parts if kind == "by_task"})
    lines = ["| setting | exact match | " + " | ".join(tasks) + " | mean loops | after the first token |"]
    lines.append("|---" * (len(tasks) + 4) + "|")
    settings = [(f"{n} loops", row) for n, row in loops.items()]
    settings += [(f"threshold {q}", row) for q, row in thresholds.items()]
    for name, row in settings:
        scores = [row.total, *(row.parts["by_task", task] for task in tasks)]
        cells = [f"{score.exact_match_pct():.1f}" for score in scores]
        cells += [f"{row.total.mean_loops():.2f}", f"{row.total.mean_loops_after_first():.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@torch.no_grad()
def generate(
    model: Ouro, tokenizer: Tokenizer, prompt: str, threshold: float, limit: int = 32
) -> tuple[str, list[int]]:
    """Greedy text for one prompt, and the loops spent on each of its tokens (recomputes the prefix: for display)."""
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    spent: list[int] = []
    while len(ids) - start < limit:
        tokens = torch.tensor([ids])
        exits = HazardExit(torch.arange(len(ids))[None] >= start, threshold, model.shape.loops)
        hidden = model(tokens, exits=exits).hidden
        spent.append(int(exits.loops[0, -1]))
        ids.append(int(model.logits(hidden[spent[-1] - 1, 0, -1]).argmax()))
        if ids[-1] in (0, 2):
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True), spent


def load(folder: Path) -> tuple[Ouro, Tokenizer, dict[str, Any]]:
    """A saved model in fp32, its tokenizer and its config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = OuroShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        loops=config["total_ut_steps"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )
    model = Ouro(shape)
    weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json")), config


def main() -> None:
    """Print the table of a saved model, or its answer to `--ask`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ask", help="a prompt to complete instead; \\n stands for a line end")
    args = parser.parse_args()
    model, tokenizer, config = load(args.folder)
    if args.ask:
        text, loops = generate(model, tokenizer, args.ask.replace("\\n", "\n"), config["early_exit_threshold"])
        print(text, loops)
        return
    batches = heldout_batches(tokenizer, args.per_task, args.seed, torch.device("cpu"))
    print(table(by_loops(model, batches), by_threshold(model, batches)))


if __name__ == "__main__":
    main()
