"""`hexad bench accuracy`: perplexity, KL divergence and agreement of a model with a reference, on a small text that comes with the package.

Both sides give, for every position, the text's own token's log-probability and the 20 likeliest tokens. KL is that of distributions
coarsened to the tokens which both lists name and "all others": a lower bound of the whole one, exact where those carry the mass.
Agreement is counted twice: over all positions, and over those where the reference is clear (its best is `CLEAR_NATS` above its second),
because engines may differ at a tie without either being wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hexad.common.errors import ConfigError

TOP = 20
CLEAR_NATS = 0.1
_CORPUS = Path(__file__).parent / "data" / "corpus.json"


class Position(msgspec.Struct, array_like=True):
    """What a model said before one token of the text."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first


Window = list[Position]  # positions 1 .. n - 1 of a window (the first token has nothing before it)


class Scorer(Protocol):
    """Something that gives log-probabilities of a text's own tokens."""

    def score(self, windows: Sequence[Sequence[int]]) -> list[Window]: ...


class Saved(msgspec.Struct):
    """A saved run, to compare later ones with."""

    model: str
    format: str
    windows: list[list[int]]
    positions: list[Window]


def corpus_text(path: Path | None = None) -> str:
    """The package's text, or that of a file."""
    if path is not None:
        return path.read_text()
    return "\n\n".join(entry["text"] for entry in json.loads(_CORPUS.read_text()))


def cut(ids: Sequence[int], window: int, limit: int | None = None) -> list[list[int]]:
    """Windows of at most `window` tokens, `limit` tokens in all; a last one of fewer than two is dropped.

    Raises:
        ConfigError: a window that short has nothing to predict.
    """
    if window < 2:
        raise ConfigError(f"--window is {window}: a window needs at least 2 tokens")
    ids = ids[:limit] if limit else ids
    return [list(ids[i : i + window]) for i in range(0, len(ids), window) if len(ids[i : i + window]) >= 2]


def perplexity(windows: Sequence[Window]) -> float:
    """exp of the mean negative log-probability."""
    logprobs = [p.logprob for window in windows for p in window]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def coarse_kl(reference: Position, other: Position) -> float:
    """KL(reference || other) over the tokens that both name and the rest, in nats."""
    theirs = dict(other.top)
    shared = [(logp, theirs[token]) for token, logp in reference.top if token in theirs]
    total = math.fsum(math.exp(p) * (p - q) for p, q in shared)
    rest_p = max(1 - math.fsum(math.exp(p) for p, _ in shared), 0.0)
    rest_q = max(1 - math.fsum(math.exp(q) for _, q in shared), 1e-9)
    if rest_p > 1e-9:
        total += rest_p * (math.log(rest_p) - math.log(rest_q))
    return max(total, 0.0)


def compare_positions(reference: Sequence[Window], other: Sequence[Window]) -> dict[str, float]:
    """KL, agreement and the difference of the text's log-probabilities.

    Raises:
        ConfigError: the two were made from different tokens.
    """
    pairs = [(a, b) for one, two in zip(reference, other, strict=False) for a, b in zip(one, two, strict=False)]
    shapes = [[len(w) for w in side] for side in (reference, other)]
    if shapes[0] != shapes[1] or any(a.token_id != b.token_id for a, b in pairs):
        raise ConfigError("the reference was made from other tokens: use the same text, tokenizer, --window and --max-tokens")
    divergences = sorted(coarse_kl(a, b) for a, b in pairs)
    same = [a.top[0][0] == b.top[0][0] for a, b in pairs]
    clear = [s for s, (a, _) in zip(same, pairs, strict=True) if a.top[0][1] - a.top[1][1] >= CLEAR_NATS]
    gaps = [abs(a.logprob - b.logprob) for a, b in pairs]
    return {
        "kl_mean": math.fsum(divergences) / len(pairs),
        "kl_p99": divergences[int(0.99 * (len(pairs) - 1))],
        "kl_max": divergences[-1],
        "top1_agreement": sum(same) / len(pairs),
        "top1_agreement_clear": sum(clear) / len(clear) if clear else 1.0,
        "logprob_difference_mean": math.fsum(gaps) / len(gaps),
        "logprob_difference_max": max(gaps),
    }


class EngineScorer:
    """The engine in this process, through its prompt log-probabilities: the path that users take."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def score(self, windows: Sequence[Sequence[int]]) -> list[Window]:
        from hexad.common.params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
        outputs = self._llm.generate([{"prompt_token_ids": list(window)} for window in windows], params)
        return [
            [Position(entry.token_id, entry.logprob, [tuple(pair) for pair in entry.top]) for entry in output.prompt_logprobs[1:]]
            for output in outputs
        ]


class TransformersScorer:
    """Hugging Face transformers in float32 on the CPU (or `device`): the reference implementation."""

    def __init__(self, path: Path, device: str = "cpu", dtype: str = "float32") -> None:
        """Load the model; the packed weights of a GGUF file are unpacked.

        Raises:
            ConfigError: transformers is not installed, or a GGUF file of a family that is not handed over to it here.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise ConfigError("the reference needs transformers: pip install transformers") from None
        model: Any = _from_gguf(path) if path.suffix == ".gguf" else AutoModelForCausalLM.from_pretrained(path)
        self._model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
        self._device = device

    def score(self, windows: Sequence[Sequence[int]]) -> list[Window]:
        import torch

        found = []
        for window in windows:
            ids = torch.tensor([list(window)], device=self._device)
            with torch.inference_mode():
                logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)  # [n - 1, vocabulary]
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
            values, tokens = logprobs.topk(TOP, dim=-1)
            pairs = zip(window[1:], own, tokens.tolist(), values.tolist(), strict=True)
            found.append([Position(token, logp, list(zip(ids_, lps, strict=True))) for token, logp, ids_, lps in pairs])
        return found


def _from_gguf(path: Path) -> Any:
    """A transformers model with a GGUF file's weights: their network, the package's unpacking."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hexad.models.catalog import read_spec
    from hexad.models.loader import open_weights

    spec = read_spec(path)
    if spec.family not in ("llama", "qwen2", "qwen3") or spec.rope is None or spec.rope.scaling != "none":
        raise ConfigError(f"{path.name} ({spec.family}) has no transformers reference as GGUF: give --reference a saved run, or a folder")
    config = AutoConfig.for_model(
        spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp.intermediate,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.attention.heads,
        num_key_value_heads=spec.attention.kv_heads,
        head_dim=spec.attention.head_dim,
        max_position_embeddings=spec.max_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    store = open_weights(path, spec)
    weights = {name: store.get(name).load(torch.float32) for name in store.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if spec.tied else set()), (missing, unexpected)
    model.tie_weights()
    return model


def save_run(path: Path, run: Saved) -> None:
    """Write a run that later ones can be compared with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(run))


def load_run(path: Path) -> Saved:
    """Read a saved run.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a run saved by `hexad bench accuracy --save`: {error}") from None
