"""Errors whose text is for the user: what is wrong and what to do, in one or two lines."""

from __future__ import annotations


class RltError(Exception):
    """Base of the errors that are shown without a traceback."""


class ConfigError(RltError):
    """The configuration cannot be used. `problems` has one line per mistake."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ModelError(RltError):
    """The model's files cannot be used: missing, broken, or of a kind that is not supported."""


class MemoryPlanError(RltError):
    """The device has too little memory for what the configuration asks."""


class GenerationError(RltError):
    """A request that was accepted could not be finished: the model computed numbers that are not finite."""
