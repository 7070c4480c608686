"""Text, ids and log-probabilities of a choice, however its tokens are cut and grouped."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenLogprobs
from hexad.orchestration.messages import Output
from hexad.orchestration.output import ChoiceOutput

EOS = 1
END_OF_TURN = 2


class PieceTokenizer:
    """Ids of arbitrary byte pieces, made on demand. 0 is the prompt, EOS and END_OF_TURN are special tokens with names."""

    def __init__(self):
        self.pieces = [b"<p>", b"</s>", b"<|end|>"]

    def add(self, piece: bytes) -> int:
        self.pieces.append(piece)
        return len(self.pieces) - 1

    def token_bytes(self, token_id):
        return self.pieces[token_id]

    def is_special(self, token_id):
        return token_id in (EOS, END_OF_TURN)

    def decode(self, token_ids, skip_special_tokens=True):
        shown = (i for i in token_ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(self.pieces[i] for i in shown).decode("utf-8", "replace")


def logprob_of(token_id, index):
    return TokenLogprobs(token_id, -float(index), 1, ((token_id, -float(index)),))


def outputs_of(ids, groups=(), finish_reason="length", stop_token_id=None):
    """Outputs that carry `ids` in groups of the given sizes (the rest singly), the last one terminal."""
    sizes, rest = [], len(ids)
    for size in groups:
        size = min(size, rest)
        sizes.append(size)
        rest -= size
    sizes += [1] * rest
    start, outputs = 0, []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        chunk = tuple(ids[start : start + size])
        outputs.append(
            Output(
                request_id="r",
                choice=0,
                token_ids=chunk,
                logprobs=tuple(logprob_of(t, start + i) for i, t in enumerate(chunk)),
                finish_reason=finish_reason if last else None,
                stop_token_id=stop_token_id if last else None,
            )
        )
        start += size
    return outputs or [Output(request_id="r", choice=0, finish_reason=finish_reason)]


def run(tokenizer, ids, params, groups=(), finish_reason="length", stop_token_id=None):
    """All deltas of a choice, and the choice."""
    choice = ChoiceOutput(tokenizer, params, [0], 0)
    deltas = []
    for output in outputs_of(ids, groups, finish_reason, stop_token_id):
        deltas.append(choice.push(output))
        if deltas[-1].done:
            break
    assert choice.done and deltas[-1].done
    return deltas, choice


def joined(deltas):
    """A non-streaming answer: text, ids, entries."""
    return (
        "".join(d.text for d in deltas),
        [t for d in deltas for t in d.token_ids],
        [e for d in deltas for e in d.logprobs],
        b"".join(b for d in deltas for b in d.logprob_bytes),
    )


def cut(data: bytes, cuts):
    """`data` cut at the given places; no piece is empty."""
    places = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)}) if data else [0]
    return [data[a:b] for a, b in pairwise(places)]


TEXT = st.text(alphabet="abAé🦜 \n", max_size=24)
CUTS = st.lists(st.integers(0, 200), max_size=20)
GROUPS = st.lists(st.integers(0, 5), max_size=10)


# B01: stop strings


@settings(deadline=None)
@given(text=TEXT, cuts=CUTS, groups=GROUPS, data=st.data())
def test_b01_no_character_of_a_stop_string_is_sent(text, cuts, groups, data):
    start = data.draw(st.integers(0, len(text)))
    stop = text[start : data.draw(st.integers(start, len(text)))] or "zz"
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(piece) for piece in cut(text.encode(), cuts)]
    params = SamplingParams(stop=(stop,))
    deltas, choice = run(tokenizer, ids, params, groups)
    whole, _ = run(tokenizer, ids, params, (len(ids),))
    found = text.find(stop)
    assert joined(deltas)[0] == (text[:found] if found >= 0 else text)
    assert joined(deltas) == joined(whole)
    assert deltas[-1].finish_reason == ("stop" if found >= 0 else "length")
    assert deltas[-1].stop_reason == (stop if found >= 0 else None)
    assert choice.num_tokens == len(joined(deltas)[1])


def test_b01_the_reported_case():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(p) for p in (b"34", b"5", b"67", b"8", b"9")]
    deltas, choice = run(tokenizer, ids, SamplingParams(stop=("345678",)))
    assert "".join(d.text for d in deltas) == ""
    assert (deltas[-1].finish_reason, deltas[-1].abort, choice.num_tokens) == ("stop", True, 4)
    ids = [tokenizer.add(p) for p in (b"12", b"34", b"5", b"67", b"89")]
    deltas, _ = run(tokenizer, ids, SamplingParams(stop=("345678",)))
    assert [d.text for d in deltas] == ["12", "", "", "", ""]


def test_b01_text_held_back_is_released_when_the_match_fails_or_the_text_ends():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(p) for p in (b"a", b"EN", b"D", b"x", b"EN")]
    deltas, _ = run(tokenizer, ids, SamplingParams(stop=("ENDE",)))
    assert [d.text for d in deltas] == ["a", "", "", "ENDx", "EN"]
    assert deltas[-1].finish_reason == "length" and not deltas[-1].abort


@settings(deadline=None)
@given(text=TEXT, cuts=CUTS, groups=GROUPS, stops=st.lists(st.text(alphabet="abAé", min_size=1, max_size=4), min_size=1, max_size=4))
def test_b01_of_several_stops_the_earliest_wins_with_and_without_its_own_text(text, cuts, groups, stops):
    tokenizer = PieceTokenizer()
    pieces = cut(text.encode(), cuts)
    ids = [tokenizer.add(piece) for piece in pieces]
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    for include in (False, True):
        deltas, choice = run(tokenizer, ids, SamplingParams(stop=tuple(stops), include_stop_str_in_output=include), groups)
        if not found:
            assert joined(deltas)[0] == text
            continue
        start, length, stop = found[0]
        end = start + length
        assert joined(deltas)[0] == text[: end if include else start]
        assert deltas[-1].stop_reason == stop
        wanted, seen = 0, b""
        while len(seen.decode("utf-8", "ignore")) < end:
            seen += pieces[wanted]
            wanted += 1
        assert choice.num_tokens == wanted == len(joined(deltas)[1])


# B02: characters over several tokens


@settings(deadline=None)
@given(text=st.text(max_size=20), cuts=CUTS, groups=GROUPS)
def test_b02_characters_are_never_cut(text, cuts, groups):
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(piece) for piece in cut(text.encode(), cuts)]
    deltas, _ = run(tokenizer, ids, SamplingParams(), groups)
    assert "".join(d.text for d in deltas) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in d.text for d in deltas)


@settings(deadline=None)
@given(data=st.binary(max_size=16), cuts=CUTS, groups=GROUPS)
def test_b02_invalid_and_unfinished_bytes_give_the_same_text_in_both_modes(data, cuts, groups):
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(piece) for piece in cut(data, cuts)]
    streamed, _ = run(tokenizer, ids, SamplingParams(), groups)
    assert "".join(d.text for d in streamed) == data.decode("utf-8", "replace") == tokenizer.decode(ids)


def test_b02_a_character_that_the_length_limit_cuts_is_one_replacement_character():
    tokenizer = PieceTokenizer()
    parrot = "🦜".encode()
    deltas, _ = run(tokenizer, [tokenizer.add(p) for p in (b"ok ", parrot[:2], parrot[2:3])], SamplingParams())
    assert [d.text for d in deltas] == ["ok ", "", "\ufffd"]


def test_b02_a_prompt_that_ends_inside_a_character_is_continued():
    tokenizer = PieceTokenizer()
    parrot = "🦜".encode()
    prompt, rest = tokenizer.add(parrot[:3]), tokenizer.add(parrot[3:])
    choice = ChoiceOutput(tokenizer, SamplingParams(), [0, prompt])
    assert choice.push(Output(request_id="r", choice=0, token_ids=(rest,))).text == "🦜"


# B07: log-probabilities


@settings(deadline=None)
@given(text=TEXT, cuts=CUTS, groups=GROUPS, data=st.data())
def test_b07_entries_go_out_with_their_text(text, cuts, groups, data):
    stop = data.draw(st.sampled_from(["", "ZZZZ", "a", "ab", "é🦜", "aab", " \n"]))
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(piece) for piece in cut(text.encode(), cuts)]
    deltas, _ = run(tokenizer, ids, SamplingParams(logprobs=2, stop=(stop,) if stop else ()), groups)
    sent, described = b"", b""
    for delta in deltas:
        sent += delta.text.encode()
        described += b"".join(delta.logprob_bytes)
        assert len(delta.logprobs) == len(delta.logprob_bytes)
        if not delta.done:
            assert sent.startswith(described)  # no entry for text not yet released
            assert len(delta.token_ids) == len(delta.logprobs)
    stopped = deltas[-1].finish_reason == "stop"
    assert described.startswith(sent) if stopped else described == sent
    _, out_ids, entries, _ = joined(deltas)
    assert entries == [logprob_of(t, i) for i, t in enumerate(ids[: len(entries)])]
    assert out_ids == ids[: len(out_ids)] and len(out_ids) >= len(entries)
    whole, _ = run(tokenizer, ids, SamplingParams(logprobs=2, stop=(stop,) if stop else ()), (len(ids),))
    assert joined(whole) == joined(deltas)


def test_b07_tokens_wait_for_their_text_and_no_longer():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(p) for p in (b"a", b"Z", b"Zb", "é".encode()[:1], "é".encode()[1:], b"cZ", b"d")]
    deltas, _ = run(tokenizer, ids, SamplingParams(logprobs=0, stop=("ZZZ",)))
    assert [d.text for d in deltas] == ["a", "", "ZZb", "", "é", "c", "Zd"]
    assert [list(d.logprob_bytes) for d in deltas] == [[b"a"], [], [b"Z", b"Zb"], [], [b"\xc3", b"\xa9"], [], [b"cZ", b"d"]]


def test_b07_the_token_that_ends_the_choice_has_an_id_but_no_entry():
    tokenizer = PieceTokenizer()
    hello = tokenizer.add(b"hello")
    deltas, choice = run(tokenizer, [hello, EOS], SamplingParams(logprobs=1), finish_reason="stop", stop_token_id=EOS)
    assert joined(deltas) == ("hello", [hello, EOS], [logprob_of(hello, 0)], b"hello")
    assert (choice.num_tokens, deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].abort) == (2, "stop", None, False)


# Ends


def test_the_stop_token_is_named_and_shown_only_on_request():
    tokenizer = PieceTokenizer()
    word, end = tokenizer.add(b"word"), tokenizer.add(b"!")
    for include, text in ((False, "word"), (True, "word!")):
        params = SamplingParams(stop_token_ids=(end,), include_stop_str_in_output=include)
        deltas, choice = run(tokenizer, [word, end], params, finish_reason="stop", stop_token_id=end)
        assert (joined(deltas)[0], deltas[-1].stop_reason, choice.num_tokens) == (text, end, 2)


@pytest.mark.parametrize(
    ("skip", "include", "text"), [(True, True, "hi"), (False, True, "hi</s>"), (False, False, "hi"), (True, False, "hi")]
)
def test_the_end_of_sequence_shows_its_name_only_when_twice_asked(skip, include, text):
    tokenizer = PieceTokenizer()
    params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
    deltas, _ = run(tokenizer, [tokenizer.add(b"hi"), EOS], params, finish_reason="stop", stop_token_id=EOS)
    assert joined(deltas)[0] == text


def test_special_tokens_inside_the_text():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(b"a"), END_OF_TURN, tokenizer.add(b"b")]
    assert joined(run(tokenizer, ids, SamplingParams(logprobs=0))[0]) == ("ab", ids, [logprob_of(t, i) for i, t in enumerate(ids)], b"ab")
    assert joined(run(tokenizer, ids, SamplingParams(skip_special_tokens=False))[0])[0] == "a<|end|>b"


@settings(deadline=None)
@given(count=st.integers(0, 8), minimum=st.integers(0, 8), groups=GROUPS)
def test_min_tokens_makes_earlier_stops_ordinary_text(count, minimum, groups):
    """Tokens "xS": the stop "S" ends the choice with the first token that is at least the min_tokens-th."""
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(b"xS") for _ in range(count)]
    deltas, choice = run(tokenizer, ids, SamplingParams(stop=("S",), min_tokens=minimum), groups)
    last = max(1, minimum)
    if count >= last:
        assert (joined(deltas)[0], choice.num_tokens, deltas[-1].finish_reason) == ("xS" * (last - 1) + "x", last, "stop")
    else:
        assert (joined(deltas)[0], choice.num_tokens, deltas[-1].finish_reason) == ("xS" * count, count, "length")


def test_a_stop_that_straddles_min_tokens_still_ends_the_text():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(p) for p in (b"aS", b"T", b"b")]
    deltas, choice = run(tokenizer, ids, SamplingParams(stop=("ST",), min_tokens=2))
    assert (joined(deltas)[0], choice.num_tokens) == ("a", 2)


def test_a_stop_in_the_last_output_needs_no_abort():
    tokenizer = PieceTokenizer()
    deltas, _ = run(tokenizer, [tokenizer.add(b"a."), EOS], SamplingParams(stop=(".",)), (2,), "stop", EOS)
    assert (deltas[-1].text, deltas[-1].abort, deltas[-1].stop_reason) == ("a", False, ".")
    assert len(deltas[-1].token_ids) == 1  # the end of sequence came after the stop


def test_a_stop_decided_late_counts_up_to_the_token_that_completed_it():
    """ "bc" waits for "abcd": the tokens drawn meanwhile are dropped."""
    tokenizer = PieceTokenizer()
    a, bc, x = (tokenizer.add(p) for p in (b"a", b"bc", b"x"))
    params = SamplingParams(stop=("abcd", "bc"))
    deltas, choice = run(tokenizer, [a, bc, x, x], params)
    assert (joined(deltas)[:2], choice.num_tokens, deltas[-1].stop_reason) == (("a", [a, bc]), 2, "bc")
    deltas, choice = run(tokenizer, [a, bc], params)
    assert (joined(deltas)[:2], choice.num_tokens, deltas[-1].finish_reason) == (("a", [a, bc]), 2, "stop")


def test_a_stop_is_completed_by_the_token_with_the_last_byte_of_its_last_character():
    tokenizer = PieceTokenizer()
    ids = [tokenizer.add(p) for p in ("é".encode()[:1], "é".encode()[1:])]
    deltas, choice = run(tokenizer, ids, SamplingParams(stop=("é",)))
    assert (joined(deltas)[:2], choice.num_tokens) == (("", ids), 2)


def test_after_the_end_everything_is_ignored():
    tokenizer = PieceTokenizer()
    _, choice = run(tokenizer, [tokenizer.add(b"a.")], SamplingParams(stop=(".",)))
    late = choice.push(Output(request_id="r", choice=0, token_ids=(tokenizer.add(b"late"),), finish_reason="abort"))
    assert late.text == "" and late.token_ids == () and not late.done
    assert choice.num_tokens == 1
    assert choice.flush().text == ""


def test_errors_and_aborts_end_the_choice_with_what_was_held_back():
    tokenizer = PieceTokenizer()
    choice = ChoiceOutput(tokenizer, SamplingParams(stop=("END",)), [0])
    assert choice.push(Output(request_id="r", choice=0, token_ids=(tokenizer.add(b"xEN"),))).text == "x"
    failed = choice.push(Output(request_id="r", choice=0, error="NaN", error_code="request_failed"))
    assert (failed.text, failed.finish_reason, failed.error, failed.error_code, failed.done) == (
        "EN",
        "error",
        "NaN",
        "request_failed",
        True,
    )
    choice = ChoiceOutput(tokenizer, SamplingParams(stop=("END",)), [0])
    choice.push(Output(request_id="r", choice=0, token_ids=(tokenizer.add(b"xEN"),)))
    flushed = choice.flush()
    assert (flushed.text, flushed.finish_reason, flushed.done, len(flushed.token_ids)) == ("EN", "abort", True, 1)


def test_a_long_text_costs_no_more_a_token_than_a_short_one():
    """Work is counted, not timed: calls into the tokenizer for each token do not grow."""
    tokenizer = PieceTokenizer()
    calls = 0
    inner = tokenizer.token_bytes

    def counted(token_id):
        nonlocal calls
        calls += 1
        return inner(token_id)

    tokenizer.token_bytes = counted
    tokenizer.decode = lambda *a, **k: pytest.fail("decode in byte mode")
    ids = [tokenizer.add(random.choice([b"a", b"bc", b"\xc3", b"\xa9"])) for _ in range(3000)]
    run(tokenizer, ids, SamplingParams(stop=("never",)))
    assert calls < 3000 + 20
