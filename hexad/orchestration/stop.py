"""Stop strings in text that arrives in pieces. No torch.

The rule is a property of the whole text, so it does not depend on how that was cut into pieces: of all occurrences of all stop strings the
one that starts first wins; of several that start there, the shortest. Text is held back only as long as it could still become (part of)
such an occurrence: its longest suffix that begins a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """Where a stop string was found, in characters of the whole text."""

    stop: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.stop)


class StopAutomaton:
    """All stop strings as one Aho-Corasick automaton: a node is a prefix of some stop string. Immutable after construction."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.longest: list[str | None] = [None]  # the longest stop string that ends at this node
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.children[node].get(char)
            if child is None:
                child = len(self.children)
                self.children[node][char] = child
                self.children.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.longest.append(None)
            node = child
        if stop:
            self.longest[node] = stop

    def _link(self) -> None:
        queue = list(self.children[0].values())
        for node in queue:  # breadth first: shallower nodes are complete
            for char, child in self.children[node].items():
                self.fail[child] = self.next(self.fail[node], char)
                if self.longest[child] is None:
                    self.longest[child] = self.longest[self.fail[child]]
                queue.append(child)

    def next(self, node: int, char: str) -> int:
        """The node of the longest suffix of (text + char) that begins a stop string."""
        while True:
            child = self.children[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fail[node]


class StopMatcher:
    """Watches one text. `push` returns what may be shown; once `match` is set, nothing more ever is."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._automaton = StopAutomaton(stops)
        self._include_stop = include_stop
        self._first_chars = frozenset(stop[0] for stop in stops if stop)
        self._node = 0
        self._held = ""  # not yet shown
        self._length = 0  # characters seen
        self._num_shown = 0  # characters given out
        self._best: StopMatch | None = None  # found, but an occurrence that starts earlier may still be completed
        self.match: StopMatch | None = None

    @property
    def held(self) -> int:
        """Characters held back now."""
        return len(self._held)

    def push(self, text: str, armed: bool = True) -> str:
        """Add text; returns what may be shown now. Occurrences that end while not `armed` are ordinary text."""
        if self.match is not None:
            return ""
        if not self._held and not any(char in self._first_chars for char in text):
            self._length += len(text)
            self._num_shown += len(text)
            return text
        self._held += text
        for char in text:
            self._length += 1
            self._step(char, armed)
            if self.match is not None:
                return self._cut()
        return self._release(self._automaton.depth[self._node])

    def flush(self) -> str:
        """The text is complete: what was held back is shown, up to an occurrence that was waiting for a better one."""
        if self.match is not None:
            return ""
        if self._best is not None:
            self.match = self._best
            return self._cut()
        return self._release(0)

    def _step(self, char: str, armed: bool) -> None:
        automaton = self._automaton
        self._node = automaton.next(self._node, char)
        found = automaton.longest[self._node]
        if found is not None and armed:
            start = self._length - len(found)
            if self._best is None or start < self._best.start:
                self._best = StopMatch(found, start)
        if self._best is not None:
            if self._length - automaton.depth[self._node] >= self._best.start:
                self.match = self._best
        elif found is not None:
            while self._node and not automaton.children[self._node]:  # passed over: only what can still grow is held
                self._node = automaton.fail[self._node]

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        self._num_shown += cut
        return shown

    def _cut(self) -> str:
        """The visible rest before (or with) the match; everything after it is dropped."""
        assert self.match is not None
        end = self.match.end if self._include_stop else self.match.start
        shown, self._held = self._held[: end - self._num_shown], ""
        self._num_shown += len(shown)
        return shown
