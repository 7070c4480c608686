"""Incremental text of real tokenizers: SentencePiece with byte fallback, byte-level BPE, and one without known bytes."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from hexad.common.params import SamplingParams
from hexad.models.formats.built import BuiltTokenizer
from hexad.models.tokenizer import Tokenizer
from hexad.orchestration.detokenize import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from hexad.orchestration.messages import Output
from hexad.orchestration.output import ChoiceOutput


@pytest.fixture
def rng():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def wrap(backend, specials):
    ids = frozenset(backend.token_to_id(s) for s in specials)
    return Tokenizer(BuiltTokenizer(backend=backend, special_ids=ids, bos_id=None, eos_id=None, pad_id=None))


def llama2():
    """Llama-2 style: pieces with "▁" for a space, bytes for everything else, one leading space dropped."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["▁", "▁▁", "▁Green", "▁eggs", "▁and", "▁ham", "ham", "s", "▁▁▁x", ".", ",", "é", "▁東", "京", "\n", "▁.", "a▁b"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(s, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    return backend


def byte_level(rng):
    """Byte-level BPE with random merged pieces, so that tokens cut characters anywhere."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = "🦜 東京駅 ř a b"
    spelt = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    pieces = alphabet + list({spelt[i : i + n] for i in range(len(spelt)) for n in (2, 3, 5) if len(spelt[i : i + n]) == n})
    backend = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])
    return backend


def stream(tokenizer, prompt, output, skip=True):
    choice = ChoiceOutput(tokenizer, SamplingParams(skip_special_tokens=skip), prompt)
    deltas = [choice.push(Output(request_id="r", choice=0, token_ids=(t,))) for t in output]
    deltas.append(choice.push(Output(request_id="r", choice=0, finish_reason="length")))
    whole = ChoiceOutput(tokenizer, SamplingParams(skip_special_tokens=skip), prompt)
    at_once = whole.push(Output(request_id="r", choice=0, token_ids=tuple(output), finish_reason="length"))
    text = "".join(d.text for d in deltas)
    assert at_once.text == text
    return text


def random_pieces(rng, backend, count):
    """Ids of whole characters: single pieces, or the byte tokens of one character."""
    plain = [i for p, i in backend.get_vocab().items() if not p.startswith("<0x") and p != "<unk>"]
    ids = []
    for _ in range(count):
        if rng.random() < 0.3:
            ids += [backend.token_to_id(f"<0x{b:02X}>") for b in rng.choice(["🦜", "ř", " ", "駅", "x"]).encode()]
        else:
            ids.append(rng.choice(plain))
    return ids


@pytest.mark.parametrize("skip", [True, False])
def test_b04_sentencepiece_streams_are_the_prefix_difference(rng, skip):
    backend = llama2()
    tokenizer = wrap(backend, ["<unk>", "<s>", "</s>"])
    for _ in range(200):
        prompt = [1, *random_pieces(rng, backend, rng.choice([0, 1, 4]))]
        output = random_pieces(rng, backend, rng.randint(1, 12))
        before = backend.decode(prompt, skip_special_tokens=skip)
        after = backend.decode(prompt + output, skip_special_tokens=skip)
        assert after.startswith(before)
        assert stream(tokenizer, prompt, output, skip) == after[len(before) :], (prompt, output)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["▁Green", "▁eggs", "▁and", "▁ham"], " Green eggs and ham"),
        (["▁▁", "ham"], "  ham"),
        (["▁", "▁Green"], "  Green"),
        (["ham", "s"], "hams"),
    ],
)
def test_b04_spaces_after_a_prompt_are_kept_and_one_is_dropped_at_the_start_of_a_text(pieces, text):
    backend = llama2()
    tokenizer = wrap(backend, ["<unk>", "<s>", "</s>"])
    ids = [backend.token_to_id(p) for p in pieces]
    assert stream(tokenizer, [1, backend.token_to_id(".")], ids) == text
    assert stream(tokenizer, [1], ids) == text.removeprefix(" ")


def test_b02_byte_level_streams_equal_the_whole_text(rng):
    backend = byte_level(rng)
    tokenizer = wrap(backend, ["<|im_end|>"])
    assert isinstance(make_detokenizer(tokenizer, [5]), ByteDetokenizer)
    for _ in range(200):
        output = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 20))]
        for skip in (True, False):
            assert stream(tokenizer, [5], output, skip) == backend.decode(output, skip_special_tokens=skip)


class WithoutBytes:
    """A tokenizer whose pieces' bytes are not known."""

    def __init__(self, inner):
        self._inner = inner
        self.decoded = 0

    def token_bytes(self, token_id):
        return None

    def is_special(self, token_id):
        return self._inner.is_special(token_id)

    def decode(self, token_ids, skip_special_tokens=True):
        self.decoded += len(token_ids)
        return self._inner.decode(token_ids, skip_special_tokens)


def test_b04_windows_give_the_prefix_difference_too(rng):
    backend = llama2()
    inner = wrap(backend, ["<unk>", "<s>", "</s>"])
    tokenizer = WithoutBytes(inner)
    assert isinstance(make_detokenizer(tokenizer, [1]), WindowDetokenizer)
    for _ in range(200):
        prompt = [1, *random_pieces(rng, backend, rng.choice([0, 1, 4]))]
        output = random_pieces(rng, backend, rng.randint(1, 12))
        before, after = inner.decode(prompt), inner.decode(prompt + output)
        assert stream(tokenizer, prompt, output) == after[len(before) :], (prompt, output)


def test_windows_stay_short(rng):
    backend = llama2()
    tokenizer = WithoutBytes(wrap(backend, ["<unk>", "<s>", "</s>"]))
    detokenizer = make_detokenizer(tokenizer, [1])
    ids = random_pieces(rng, backend, 3000)
    for token_id in ids:
        detokenizer.push(token_id)
    assert tokenizer.decoded < 20 * len(ids)


def test_wordpiece_streams_like_its_own_decoder(rng):
    pieces = ["[UNK]", "[CLS]", "hello", "world", "##ly", "##s", ",", "a"]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken("[CLS]", normalized=False)])
    tokenizer = wrap(backend, ["[CLS]"])
    for _ in range(50):
        output = [rng.randrange(2, len(pieces)) for _ in range(rng.randint(1, 12))]
        assert stream(tokenizer, [1, 2], output) == backend.decode([2, *output])[len("hello") :]
