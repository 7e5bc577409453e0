"""Exact match by number of loops and by exit threshold, with the exit semantics of the server.

Greedy decoding gives exactly the expected text if and only if, fed the expected text, the model ranks every one of its
tokens first. So one parallel pass measures what generation would give. Early exits keep that equality: a token's exit
depends only on earlier tokens, and a token that stopped at loop e shows its keys of loop min(d, e) to a query in loop d.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from rlt.evals.tasks import SYSTEM_PROMPTS, Split, examples
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from data import Batch, chat_form, pad, raw_form
from model import Ouro, OuroShape

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCH = 250


@dataclass(slots=True)
class Score:
    """Counts over examples; `rest` leaves out the first answer token, which always runs every loop."""

    right: int = 0
    seen: int = 0
    loops: int = 0
    tokens: int = 0
    loops_rest: int = 0
    tokens_rest: int = 0

    def add(self, right: Tensor, loops: Tensor, tokens: Tensor, depth: int) -> None:
        """right, loops and tokens [B]: exact match, loops spent on and number of answer tokens of each example."""
        rows = len(right)
        self.right += int(right.sum())
        self.seen += rows
        self.loops += int(loops.sum())
        self.tokens += int(tokens.sum())
        self.loops_rest += int(loops.sum()) - depth * rows
        self.tokens_rest += int(tokens.sum()) - rows

    def summary(self) -> dict[str, float]:
        return {
            "exact_match_pct": round(100 * self.right / self.seen, 2),
            "mean_loops": round(self.loops / self.tokens, 3),
            "mean_loops_after_first": round(self.loops_rest / self.tokens_rest, 3),
        }


@dataclass(slots=True)
class Table:
    """Scores of one setting: over everything, and by task, form and task level."""

    total: Score = field(default_factory=Score)
    parts: dict[str, Score] = field(default_factory=lambda: defaultdict(Score))

    def summary(self) -> dict[str, object]:
        return {**self.total.summary(), "parts": {key: part.summary() for key, part in sorted(self.parts.items())}}


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


def heldout_batches(
    tokenizer: Tokenizer, per_task: int, seed: int, device: torch.device, split: Split = "heldout"
) -> list[tuple[Batch, list[str]]]:
    """Every example once raw and once as a chat turn (half of those with a system message), with its part names."""
    rng = Random(f"forms/{seed}")
    rows = []
    for e in examples(split, per_task, seed):
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else None
        level = f"level {e.task} {e.difficulty}"
        rows.append((raw_form(e), [f"task {e.task}", "form raw", level]))
        rows.append((chat_form(e, system), [f"task {e.task}", "form chat", level]))
    rows.sort(key=lambda row: sum(len(piece.text) for piece in row[0]))
    batches = []
    for at in range(0, len(rows), BATCH):
        chunk = rows[at : at + BATCH]
        batch = pad([pieces for pieces, _ in chunk], tokenizer)
        batches.append((Batch(*(t.to(device) for t in batch)), [parts for _, parts in chunk]))
    return batches


def measure(
    model: Ouro, batches: Sequence[tuple[Batch, list[list[str]]]], loops: int, threshold: float
) -> dict[str, object]:
    """The table of one setting: `loops` for everything, exits at `threshold` (1.0: never)."""
    table = Table()
    for batch, parts in batches:
        right, spent, count = (t.cpu() for t in run_batch(model, batch, loops, threshold))
        table.total.add(right, spent, count, loops)
        for i, names in enumerate(parts):
            for name in names:
                table.parts[name].add(right[i : i + 1], spent[i : i + 1], count[i : i + 1], loops)
    return table.summary()


def full_table(model: Ouro, batches: Sequence[tuple[Batch, list[list[str]]]]) -> dict[str, dict[str, object]]:
    """By loops (prompt and decode alike run that many) and by threshold (decode tokens only)."""
    depth = model.shape.loops
    return {
        "by_loops": {str(n): measure(model, batches, n, 1.0) for n in range(1, depth + 1)},
        "by_threshold": {str(q): measure(model, batches, depth, q) for q in THRESHOLDS},
    }


def recommended_threshold(by_threshold: dict[str, dict[str, object]], keep: float = 0.995) -> float:
    """The threshold with the fewest loops that keeps at least `keep` of the full-depth exact match."""
    full = float(str(by_threshold["1.0"]["exact_match_pct"]))
    good = [q for q, row in by_threshold.items() if float(str(row["exact_match_pct"])) >= keep * full]
    return float(min(good, key=lambda q: float(str(by_threshold[q]["mean_loops"]))))


@torch.no_grad()
def generate(model: Ouro, tokenizer: Tokenizer, prompt: str, threshold: float, limit: int = 32) -> tuple[str, list[int]]:
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


def load(folder: Path) -> tuple[Ouro, Tokenizer, dict[str, object]]:
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
    parser.add_argument("--ask", help="a prompt to complete instead")
    args = parser.parse_args()
    model, tokenizer, config = load(args.folder)
    if args.ask:
        print(*generate(model, tokenizer, args.ask, float(str(config["early_exit_threshold"]))))
        return
    table = full_table(model, heldout_batches(tokenizer, args.per_task, args.seed, torch.device("cpu")))
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
