"""The exit rules by name: what each needs and what its threshold means. No torch here."""

from __future__ import annotations

from typing import NamedTuple

#: far above every rule's scale, and a float32 number like all that reaches the device
MAX_THRESHOLD = 1e6


class RuleKind(NamedTuple):
    """What the configuration and the engine must know of a rule before a model is loaded."""

    #: default of `exit.threshold`; None: the checkpoint's, which is 1 in families without a gate
    threshold: float | None = None
    #: lowest and highest threshold; None: a threshold means nothing
    thresholds: tuple[float, float] | None = (0.0, MAX_THRESHOLD)
    #: needs a gate that was trained with the model
    gate: bool = False
    #: compares what successive loops made of a row (`rlt.depth.criteria`)
    criterion: bool = False
    #: needs coda and head after each loop that it looks at
    logits: bool = False


#: Thresholds of gates are accumulated exit probabilities: 1 or more switches early exit off. Those of criteria are
#: what a value must fall below, 0 switches early exit off; but `argmax` is a count that must be reached.
RULES = {
    "full_depth": RuleKind(thresholds=(1.0, MAX_THRESHOLD)),
    "ouro": RuleKind(gate=True),
    "ouro_delayed": RuleKind(gate=True),
    "random_lookahead": RuleKind(),
    "trace": RuleKind(thresholds=None),
    "latent_diff": RuleKind(0.03, criterion=True),
    "cosine": RuleKind(1e-3, (0.0, 2.0), criterion=True),
    "entropy": RuleKind(1e-3, criterion=True, logits=True),
    # The paper and the model card use 5e-4.
    "kl": RuleKind(1e-3, criterion=True, logits=True),
    "minp_kl": RuleKind(1e-5, criterion=True, logits=True),
    "argmax": RuleKind(5.0, (1.0, MAX_THRESHOLD), criterion=True, logits=True),
}
