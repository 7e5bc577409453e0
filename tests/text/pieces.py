"""Texts and ways to cut them, for parsers whose result must not depend on the cuts."""

from __future__ import annotations

from hypothesis import strategies as st


def texts(*fragments: str) -> st.SearchStrategy[str]:
    """Texts of these fragments, of their beginnings, and of characters that matter to no parser."""
    parts = [*fragments, *(text[:size] for text in fragments for size in (1, len(text) - 1)), "a", " ", "\n", "é"]
    return st.lists(st.sampled_from(parts), max_size=12).map("".join)


@st.composite
def cut(draw: st.DrawFn, of: st.SearchStrategy[str]) -> list[str]:
    """Consecutive pieces of a text, some of them empty."""
    text = draw(of)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
