"""What a query at a loop reads of a token that exited earlier, as planes and page lists. No torch here.

Plane `d` holds the keys and values of loop `d`. A request has page lists: list `d` is plane `d`; where exited tokens
are kept apart (`last_exited`), list `loops + d` holds the tokens whose last loop was `d`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to keep the keys and values of looped tokens.

    `cycle` k: decode tokens overwrite plane `loop mod k` (None: one plane per loop). `exit_sorted`: a plane's exited
    tokens have a list of their own, so that deeper loops read them without copies. `serial_prompt`: a prompt token
    finishes all loops before the next one starts, since there is one plane for all.
    """

    name: str
    cycle: int | None = None
    exit_sorted: bool = False
    serial_prompt: bool = False

    def prompt_planes(self, loops: int) -> int:
        """Planes of a request with this loop limit while its prompt runs."""
        return 1 if self.serial_prompt else loops

    def decode_planes(self, loops: int) -> int:
        """Planes that decode tokens write and read."""
        return loops if self.cycle is None else min(self.cycle, loops)

    def lists(self, loops: int) -> int:
        """Page lists of a model with this many loops."""
        return 2 * loops - 1 if self.exit_sorted else loops

    def kept_planes(self, loops: int) -> list[int]:
        """For each decode plane, the prompt's plane that it continues: the deepest loop congruent to it."""
        planes, prompt = self.decode_planes(loops), self.prompt_planes(loops)
        return [plane + (prompt - 1 - plane) // planes * planes for plane in range(planes)]

    def most_pages(self, tokens: int, prompt: int, loops: int, page_size: int) -> int:
        """Pages that a request may own at most with `tokens` positions in all, `prompt` of them the prompt.

        A `prompt` of 0 means one that is through: what decoding needs counts alone.
        """
        during_prompt = self.prompt_planes(loops) * -(-prompt // page_size)
        if self.exit_sorted:
            # An exited list splits a plane's tokens: one more page begun, and both are supplied ahead of the ticks.
            split = -(-(tokens + 2 * SUPPLY_AHEAD) // page_size) + 1
            return max(during_prompt, (loops - 1) * split + -(-tokens // page_size))
        return max(during_prompt, self.decode_planes(loops) * -(-tokens // page_size))

    def most_tokens(self, pages: int, loops: int, page_size: int) -> int:
        """Positions of a request that surely fits into `pages` pages, however long its prompt is."""
        if self.exit_sorted and loops > 1:
            return max(0, (pages - loops + 1) // loops * page_size - 2 * SUPPLY_AHEAD)
        return pages // self.prompt_planes(loops) * page_size


#: positions per page list that may be supplied before they are known to be needed: one for the next tick, and one for
#: the tick whose results are not read yet
SUPPLY_AHEAD = 2


def parse_layout(name: str) -> Layout:
    """The layout that the configuration names (`kv.layout`, checked there)."""
    if name == "last_exited":
        return Layout(name, exit_sorted=True)
    if name == "last_exited_copy":
        return Layout(name)
    if name == "shared":
        return Layout(name, cycle=1, serial_prompt=True)
    if name == "last_step":
        return Layout(name, cycle=1)
    return Layout(name, cycle=int(name.removeprefix("cyclic:")))
