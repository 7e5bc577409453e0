"""Exact match by number of loops and by exit threshold, with the exit semantics of the server.

Greedy decoding gives exactly the expected text if and only if, fed the expected text, the model ranks every one of its
tokens first. So one parallel pass measures what generation would give. Early exits keep that equality: the exit of a
token depends only on earlier ones, and a token that stopped at loop e shows loop d its keys of loop min(d, e).
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from checkpoint import load_model
from families.common import Exit, TinyModel
from tokenizer import Encoder
from tokenizers import Tokenizer
from torch import Tensor

from data import Batch, Piece, chat_form, draw_opener, pad, raw_form
from rlt.evals.tasks import SYSTEM_PROMPTS, examples

BATCH = 250
KEEP = 0.995
"""Share of the full-depth exact match that a recommended threshold must keep."""


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
ByThreshold = dict[float, Row]


@torch.no_grad()
def run_batch(model: TinyModel, batch: Batch, loops: int, exit: Exit | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per example: exact match, loops spent on its answer tokens, number of answer tokens. Each [B]."""
    tokens, answer = batch
    inputs, targets, wanted = tokens[:, :-1], tokens[:, 1:], answer[:, 1:]
    # A decode token is an answer token that is fed back; the prompt, its last token included, runs every loop.
    logits, spent = model.predict(inputs, loops, answer[:, :-1], exit)
    right = ((logits.argmax(-1) == targets) | ~wanted).all(dim=1)
    return right, (spent * wanted).sum(dim=1), wanted.sum(dim=1)


def heldout_batches(model: TinyModel, tokenizer: Tokenizer, per_task: int, seed: int, device: torch.device) -> Batches:
    """Every example once raw and once as a chat turn (half of those with a system message), with its parts."""
    rng = Random(f"forms/{seed}")
    dialect, encoder = model.dialect, Encoder(tokenizer)
    rows: list[tuple[list[Piece], list[Part]]] = []
    for e in examples("heldout", per_task, seed):
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else None
        parts = [("by_task", e.task), ("by_level", f"{e.task} {e.difficulty}")]
        rows.append((raw_form(e, dialect), [*parts, ("by_form", "raw")]))
        rows.append((chat_form(e, system, dialect, draw_opener(rng, dialect)), [*parts, ("by_form", "chat")]))
    rows.sort(key=lambda row: sum(len(piece.text) for piece in row[0]))
    batches: Batches = []
    for at in range(0, len(rows), BATCH):
        chunk = rows[at : at + BATCH]
        batch = pad([pieces for pieces, _ in chunk], encoder)
        batches.append((Batch(batch.tokens.to(device), batch.answer.to(device)), [parts for _, parts in chunk]))
    return batches


def measure(model: TinyModel, batches: Batches, loops: int, exit: Exit | None = None) -> Row:
    """The scores of one setting: `loops` for everything, exits under `exit` (None: never)."""
    row = Row(Score(loops), defaultdict(lambda: Score(loops)))
    for batch, parts in batches:
        counts = (t.tolist() for t in run_batch(model, batch, loops, exit))
        for right, spent, tokens, names in zip(*counts, parts, strict=True):
            row.total.add(right, spent, tokens)
            for name in names:
                row.parts[name].add(right, spent, tokens)
    return row


def by_loops(model: TinyModel, batches: Batches) -> dict[int, Row]:
    """Prompt and decode alike run that many loops."""
    return {n: measure(model, batches, n) for n in range(1, model.loops + 1)}


def by_threshold(model: TinyModel, batches: Batches) -> dict[str, ByThreshold]:
    """Decode tokens stop early, the prompt runs every loop; by rule and threshold."""
    return {
        rule: {q: measure(model, batches, model.loops, Exit(rule, q)) for q in thresholds}
        for rule, thresholds in model.rules.items()
    }


def recommended(rows: Mapping[str, ByThreshold], full: Row) -> dict[str, float]:
    """By rule, the threshold with the fewest loops that keeps `KEEP` of the full-depth exact match, if one does."""
    least = KEEP * full.total.exact_match_pct()
    good = {rule: [q for q, row in by_q.items() if row.total.exact_match_pct() >= least] for rule, by_q in rows.items()}
    return {rule: min(qs, key=lambda q: rows[rule][q].total.mean_loops()) for rule, qs in good.items() if qs}


def table(loops: dict[int, Row], thresholds: Mapping[str, ByThreshold]) -> str:
    """A Markdown table: exact match by task for every setting."""
    tasks = sorted({name for kind, name in loops[1].parts if kind == "by_task"})
    lines = ["| setting | exact match | " + " | ".join(tasks) + " | mean loops | after the first token |"]
    lines.append("|---" * (len(tasks) + 4) + "|")
    settings = [(f"{n} loops", row) for n, row in loops.items()]
    settings += [(f"{rule} {q:g}", row) for rule, rows in thresholds.items() for q, row in rows.items()]
    for name, row in settings:
        scores = [row.total, *(row.parts["by_task", task] for task in tasks)]
        cells = [f"{score.exact_match_pct():.1f}" for score in scores]
        cells += [f"{row.total.mean_loops():.2f}", f"{row.total.mean_loops_after_first():.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@torch.no_grad()
def generate(
    model: TinyModel, tokenizer: Tokenizer, ids: list[int], exit: Exit | None, limit: int = 32
) -> tuple[list[int], list[int]]:
    """Greedy tokens after a prompt, and the loops spent on each (recomputes the prefix: for display)."""
    dialect, start = model.dialect, len(ids)
    ends = {tokenizer.token_to_id(token) for token in (dialect.end_of_turn, dialect.end_of_text)}
    ids, spent = list(ids), list[int]()
    while len(ids) - start < limit:
        logits, loops = model.predict(torch.tensor([ids]), model.loops, torch.arange(len(ids))[None] >= start, exit)
        spent.append(int(loops[0, -1]))
        # The server never gives an id that the tokenizer does not have.
        ids.append(int(logits[0, -1, : tokenizer.get_vocab_size()].argmax()))
        if ids[-1] in ends:
            break
    return ids[start:], spent


def main() -> None:
    """Print the table of a saved model, or its answer to `--ask`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ask", help="a prompt to complete instead; \\n stands for a line end")
    parser.add_argument("--rule", help="exit rule for --ask (default: the family's learned gate, if it has one)")
    parser.add_argument("--threshold", type=float, help="its threshold (default: the one in config.json)")
    args = parser.parse_args()
    model, tokenizer = load_model(args.folder)
    if args.ask:
        exit = model.exit if args.threshold is None else Exit(args.rule or next(iter(model.rules)), args.threshold)
        tokens, loops = generate(model, tokenizer, tokenizer.encode(args.ask.replace("\\n", "\n")).ids, exit)
        print(tokenizer.decode(tokens, skip_special_tokens=True), loops)
        return
    batches = heldout_batches(model, tokenizer, args.per_task, args.seed, torch.device("cpu"))
    print(table(by_loops(model, batches), by_threshold(model, batches)))


if __name__ == "__main__":
    main()
