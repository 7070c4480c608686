"""A slow, plain reference of the sampler in float64: one row at a time, one token at a time."""

from __future__ import annotations

import math

import numpy as np

from hexad.common.params import SamplingParams


def edited(logits, params: SamplingParams, prompt, output, eos=(), mask=None):
    """Logits of one row after allowed ids, mask, bad words, min_tokens, bias and penalties."""
    x = np.array(logits, dtype=np.float64)
    vocab = len(x)
    for t in range(vocab):
        if params.allowed_token_ids is not None and t not in params.allowed_token_ids:
            x[t] = -math.inf
        if mask is not None and not (t // 8 < len(mask) and mask[t // 8] >> (t % 8) & 1):
            x[t] = -math.inf
    for word in params.bad_words_ids:
        before = list(word[:-1])
        if len(output) >= len(before) and list(output[len(output) - len(before) :]) == before:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for t in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            x[t] = -math.inf
    for t, bias in params.logit_bias.items():
        x[t] += bias
    for t in range(vocab):
        if t in set(prompt) | set(output):
            x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
        count = list(output).count(t)
        x[t] -= params.frequency_penalty * count
        x[t] -= params.presence_penalty * (count > 0)
    return x


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def ranking(x):
    """Ids, best first, ties by lowest id."""
    return sorted(range(len(x)), key=lambda t: (-x[t], t))


def distribution(x, params: SamplingParams, nudge: float = 0.0):
    """Probabilities after temperature and filters; `nudge` moves the thresholds of min_p and top_p by that relative amount."""
    if params.temperature < 1e-5 or params.top_k == 1:
        p = np.zeros(len(x))
        p[ranking(x)[0]] = 1.0
        return p
    p = softmax((x - x.max()) / params.temperature)
    order = ranking(x)
    keep = [t for t in order if t == order[0] or p[t] >= params.min_p * p.max() * (1 - nudge)]
    if params.top_k > 0:
        keep = keep[: params.top_k]
    mass, running, nucleus = sum(p[t] for t in keep), 0.0, []
    for t in keep:
        if params.top_p < 1 and nucleus and running >= params.top_p * mass * (1 + nudge):
            break
        nucleus.append(t)
        running += p[t]
    kept = np.zeros(len(x))
    kept[nucleus] = p[nucleus]
    return kept / kept.sum()


def logprobs(x):
    return x - x.max() - math.log(np.exp(x - x.max()).sum())
