"""The stop automaton against a brute-force reference."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.orchestration.stop import StopMatcher

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5)
PIECES = st.lists(st.text(alphabet="abcx", max_size=5), max_size=12)


def longest_hold(text, stops):
    """Length of the longest suffix of `text` that begins a stop string without being all of it."""
    return max(k for k in range(len(text) + 1) if any(len(s) > k and text.endswith(s[:k]) for s in stops))


@settings(deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_b01_exactly_what_could_become_a_stop_is_held_back(stops, pieces):
    matcher = StopMatcher(stops)
    seen, shown = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if any(s in seen for s in stops):
            break
        assert shown == seen[: len(seen) - longest_hold(seen, stops)]
        assert matcher.held == longest_hold(seen, stops)
    else:
        assert shown + matcher.flush() == seen
        assert matcher.match is None


@settings(deadline=None)
@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_b01_the_match_depends_on_the_whole_text_alone(stops, pieces, include):
    text = "".join(pieces)
    matcher = StopMatcher(stops, include)
    shown = "".join(matcher.push(piece) for piece in pieces)
    shown += matcher.flush()
    found = sorted((text.find(s), len(s), s) for s in stops if s in text)
    if not found:
        assert shown == text
        return
    start, length, stop = found[0]
    assert matcher.match is not None and (matcher.match.stop, matcher.match.start) == (stop, start)
    assert shown == text[: start + length * include]
    assert matcher.push("more") == matcher.flush() == ""


@settings(deadline=None)
@given(stops=STOPS, pieces=st.lists(st.tuples(st.text(alphabet="abcx", max_size=4), st.booleans()), max_size=10))
def test_unarmed_occurrences_are_ordinary_text(stops, pieces):
    armed_at = [armed for piece, armed in pieces for _ in piece]
    text = "".join(piece for piece, _ in pieces)
    ends = [(at - len(s), len(s)) for s in stops for at in range(len(s), len(text) + 1) if text[:at].endswith(s) and armed_at[at - 1]]
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece, armed) for piece, armed in pieces) + matcher.flush()
    assert shown == (text[: min(ends)[0]] if ends else text)


def test_an_earlier_start_is_waited_for():
    matcher = StopMatcher(["abcd", "bc"])
    assert [matcher.push(c) for c in "xabc"] == ["x", "", "", ""]
    assert matcher.match is None
    assert matcher.push("d") == "" and matcher.match.stop == "abcd"
    other = StopMatcher(["abcd", "bc"])
    assert other.push("xabcx") == "xa" and other.match.stop == "bc"
    at_end = StopMatcher(["abcd", "bc"])
    assert at_end.push("abc") + at_end.flush() == "a" and at_end.match.stop == "bc"


def test_the_worst_stop_strings_cost_little():
    stops = ["a" * 999 + chr(ord("b") + i) for i in range(16)]
    matcher = StopMatcher(stops)
    start = time.perf_counter()
    shown = "".join(matcher.push("a") for _ in range(5000))
    assert len(shown) == 5000 - 999
    assert time.perf_counter() - start < 2.0
