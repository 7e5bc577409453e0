"""What a query at a loop reads of a token that exited earlier, as planes and page lists. No torch here.

Plane `d` holds the keys and values of loop `d`. A request has page lists. The first `outer` are those of the layers
outside of the loops, which have one version of each token; then comes a list per plane; and where exited tokens are
kept apart (`last_exited`), a list per plane but the last for the tokens whose last loop that was.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to keep the keys and values of looped tokens.

    `cycle` k: decode tokens overwrite plane `loop mod k` (None: one plane per loop). `exit_sorted`: a plane's exited
    tokens have a list of their own, so that deeper loops read them without copies. `serial_prompt`: a prompt token
    finishes all loops before the next one starts, since there is one plane for all. `outer` is of the model: page
    lists for the layers outside of its loops (`ModelSpec.outer_lists`).
    """

    name: str
    cycle: int | None = None
    exit_sorted: bool = False
    serial_prompt: bool = False
    outer: int = 0

    def prompt_planes(self, loops: int) -> int:
        """Planes of a request with this loop limit while its prompt runs."""
        return 1 if self.serial_prompt else loops

    def decode_planes(self, loops: int) -> int:
        """Planes that decode tokens write and read."""
        return loops if self.cycle is None else min(self.cycle, loops)

    def prompt_lists(self, loops: int) -> int:
        """Page lists of a request with this loop limit while its prompt runs: each has a page of every block."""
        return self.outer + self.prompt_planes(loops)

    def decode_lists(self, loops: int) -> int:
        """Page lists to which every decode token may add, exited lists apart."""
        return self.outer + self.decode_planes(loops)

    def lists(self, loops: int) -> int:
        """Page lists at most of a request of a model with this many loops."""
        return self.outer + (2 * loops - 1 if self.exit_sorted else loops)

    def kept_lists(self, loops: int) -> list[int]:
        """For each decode list, the prompt's list that it continues: of planes, the deepest loop congruent to it."""
        planes, prompt = self.decode_planes(loops), self.prompt_planes(loops)
        deepest = [plane + (prompt - 1 - plane) // planes * planes for plane in range(planes)]
        return [*range(self.outer), *(self.outer + plane for plane in deepest)]

    def most_pages(self, tokens: int, prompt: int, loops: int, page_size: int) -> int:
        """Pages that a request may own at most with `tokens` positions in all, `prompt` of them the prompt.

        A `prompt` of 0 means one that is through: what decoding needs counts alone.
        """
        during_prompt = self.prompt_lists(loops) * -(-prompt // page_size)
        if self.exit_sorted:
            # An exited list splits a plane's tokens: one more page begun, and both are supplied ahead of the ticks.
            split = -(-(tokens + 2 * SUPPLY_AHEAD) // page_size) + 1
            return max(during_prompt, (loops - 1) * split + (self.outer + 1) * -(-tokens // page_size))
        return max(during_prompt, self.decode_lists(loops) * -(-tokens // page_size))

    def most_tokens(self, pages: int, loops: int, page_size: int) -> int:
        """Positions of a request that surely fits into `pages` pages, however long its prompt is."""
        if self.exit_sorted and loops > 1:
            return max(0, (pages - loops + 1) // (self.outer + loops) * page_size - 2 * SUPPLY_AHEAD)
        return pages // self.prompt_lists(loops) * page_size


#: positions per page list that may be supplied before they are known to be needed: one for the next tick, and one for
#: the tick whose results are not read yet
SUPPLY_AHEAD = 2


def parse_layout(name: str, outer: int = 0) -> Layout:
    """The layout that the configuration names (`kv.layout`, checked there) of a model with `outer` outer lists."""
    if name == "last_exited":
        return Layout(name, exit_sorted=True, outer=outer)
    if name == "last_exited_copy":
        return Layout(name, outer=outer)
    if name == "shared":
        return Layout(name, cycle=1, serial_prompt=True, outer=outer)
    if name == "last_step":
        return Layout(name, cycle=1, outer=outer)
    return Layout(name, cycle=int(name.removeprefix("cyclic:")), outer=outer)
