"""When a token leaves, written a second time: gates, traces and criteria, one token at a time, no line from `src/`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

STATE_RULES = ("latent_diff", "cosine")
LOGITS_RULES = ("entropy", "kl", "minp_kl", "argmax")


def stops(rule: str, cdfs: Sequence[float], *, threshold: float, min_loops: int, max_loops: int, wanted: int) -> bool:
    """Whether a decode token leaves after `len(cdfs)` loops. `wanted` is the depth that a trace asks for."""
    done = len(cdfs)
    if done >= max_loops:
        return True
    if rule == "trace":
        return done >= max(wanted, min_loops)
    looked_at = loops_looked_at(rule, done)
    return threshold < 1 and looked_at >= min_loops and cdfs[looked_at - 1] >= threshold


def loops_looked_at(rule: str, done: int) -> int:
    """After `done` loops a rule compares the CDF of this many loops."""
    return {"ouro": done, "ouro_delayed": done - 1, "random_lookahead": done - 1}[rule]


def looks(rule: str, done: int, *, min_loops: int, max_loops: int, interval: int) -> bool:
    """Whether a criterion on logits runs coda and head after `done` loops, to find out whether the token leaves."""
    return rule in LOGITS_RULES and min_loops <= done < max_loops and (done - min_loops) % interval == 0


@dataclass
class Judge:
    """A criterion and one token: its value after each look, and how sure each comparison with the threshold is."""

    rule: str
    threshold: float
    state: Tensor
    vocab: int
    #: probabilities of all looks, oldest first
    seen: list[Tensor] = field(default_factory=list)
    margin: float = math.inf

    def states(self, state: Tensor) -> bool:
        """The state after another loop; whether a criterion on states stops here."""
        before, self.state = self.state, state
        if self.rule == "latent_diff":
            return self._below(float((state - before).norm() / state.norm()))
        if self.rule == "cosine":
            angle = float(state @ before / (state.norm() * before.norm()))
            return self._below(1 - angle)
        return False

    def logits(self, logits: Tensor) -> bool:
        """The logits of another look; whether a criterion on logits stops here."""
        best, second = logits.topk(2).values.tolist()
        if self.rule == "minp_kl":
            now = torch.softmax(logits, 0)
            limit = 0.1 * now.max()
            self.margin = min(self.margin, float((now - limit).abs().min()))
            now = torch.where(now < limit, 1 / self.vocab, now)
            self.seen.append(now / now.sum())
        else:
            self.seen.append(torch.softmax(logits, 0))
        if self.rule == "argmax":
            self.margin = min(self.margin, best - second)
            tokens = [int(p.argmax()) for p in self.seen]
            count = 0
            while count + 1 < len(tokens) and tokens[-count - 2] == tokens[-1]:
                count += 1
            return count >= self.threshold
        if self.rule == "entropy":
            before = self._entropy(self.seen[-2]) if len(self.seen) > 1 else 100.0
            return self._below(abs(self._entropy(self.seen[-1]) - before))
        before = self.seen[-2] if len(self.seen) > 1 else torch.full((self.vocab,), 1 / self.vocab)
        return self._below(float((before * (before / self.seen[-1]).log()).sum()))

    def _entropy(self, p: Tensor) -> float:
        return float(-(p * (p + 1e-10).log()).sum())

    def _below(self, value: float) -> bool:
        if self.threshold == 0 or math.isnan(value):
            return False
        # Large divergences are less exact.
        self.margin = min(self.margin, abs(value - self.threshold) / max(1.0, self.threshold))
        return value < self.threshold
