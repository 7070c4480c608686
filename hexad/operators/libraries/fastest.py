"""The fastest of several kernels for the prompts at hand, by measurement.

The first step of each class (longest prompt to the next power of two, prompts in the step likewise, most keys behind the queries or not)
is computed by every kernel, as often as a network has layers; one that wins by enough serves that class from then on. So the first such
prompts wait, for a library that compiles as long as that takes, and two starts may choose differently where kernels are nearly level. A
library that fails is warned of and left alone from then on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.registry import Kernel

log = logging.getLogger(__name__)
ROUNDS, LAYERS = 3, 32
MARGIN = 0.97  # of the first kernel's time: what another has to beat
Class = tuple[int, int, bool]

_chosen: dict[Any, dict[Class, str]] = {}  # all layers of one kind share it: by arguments, kernels and card
_broken: set[str] = set()


def class_of(batch: AttentionBatch) -> Class:
    """Steps of one class are taken to have the same winner."""
    longest, rows = ((value - 1).bit_length() for value in (batch.max_query_len, batch.seq_lens.shape[0]))
    return longest, rows, batch.max_seq_len >= 2 * batch.max_query_len


def device_seconds(call: Callable[[], Any]) -> float:
    """The best of several calls, waits for the device included."""
    call()  # compiles
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return float(min(first.elapsed_time(then) for first, then in itertools.pairwise(marks))) / 1e3


class Fastest:
    """Says which of `kernels` (by name; the first is preferred) computes a step's prompts."""

    def __init__(
        self, args: AttentionArgs, kernels: Mapping[str, Kernel], seconds: Callable[[Callable[[], Any]], float] = device_seconds
    ) -> None:
        self.kernels, self.seconds = kernels, seconds
        card = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.chosen = _chosen.setdefault((args, tuple(kernels), card), {})

    def __call__(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> Kernel:
        """Measures at the first step of a class."""
        kind = class_of(batch)
        if kind not in self.chosen:
            self.chosen[kind] = self._measure(q, kv, batch)
        return self.kernels[self.chosen[kind]]

    def _measure(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> str:
        times: dict[str, float] = {}
        for name, kernel in self.kernels.items():
            if name in _broken:
                continue

            def step(kernel: Kernel = kernel) -> None:
                fresh = replace(batch, scratch={})  # what is planned once a step counts once a step
                for _ in range(LAYERS):
                    kernel(q, kv, fresh)

            try:
                times[name] = self.seconds(step) / LAYERS
            except Exception as error:  # whatever a library may end with
                if not times:
                    raise  # the package's own kernel
                _broken.add(name)
                log.warning("attention by %s fails (%s: %s); others serve in its place", name, type(error).__name__, error)
        first, best = next(iter(times)), min(times, key=times.__getitem__)
        winner = best if times[best] < MARGIN * times[first] else first
        listed = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in times.items())
        log.info("attention of %d prompts of up to %d tokens: %s; %s serves", len(batch.seq_lens), batch.max_query_len, listed, winner)
        return winner
