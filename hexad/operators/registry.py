"""Seam 3: the operator registry, between layers and kernels. This file imports no torch.

Contract
- An op is a name and its torch reference (the reference is the definition; every provider must agree with it).
- A provider registers `supports(args)`, `prepare(params)` and `bind(args)`:
    supports(args) -> list of reasons why it cannot serve these static args; empty = it can. Free of globals and of side effects
                      except a cached probe of the machine.
    prepare(args, params) -> packed parameters (bytes counted by the caller); identity by default; called once, at load.
    bind(args) -> the callable that the step calls; all look-ups happen here, none in the step. It takes what the reference takes,
                  with prepared parameters in place of plain ones.
- Static args are a frozen, hashable dataclass per op: shapes that do not change between steps, dtype, device kind.
- Candidates are tried by descending `priority`, then registration order; the reference (priority 0, provider "torch") supports all but
  what its definition leaves out (`define`'s `supports`): that, nobody needs to serve.
  `HEXAD_OPS="op=provider,..."` or `prefer` forces a choice; a forced provider that cannot serve is a ConfigError with its reasons.
- An op may be composite (mlp, decoder_layer, decode_step): its reference is the composition, and layers bind the largest one that a
  provider other than the reference supports.
- `explain` lists each candidate and why it was not taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hexad.common.errors import ConfigError, nearest

Kernel = Callable[..., Any]


def _same(_args: Any, params: Any) -> Any:
    return params


def _everything(_args: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class Provider:
    """One implementation of one op."""

    op: str
    name: str  # "torch", "triton", "native", "flashinfer", ...
    bind: Callable[[Any], Kernel]
    supports: Callable[[Any], list[str]]
    prepare: Callable[[Any, Any], Any] = _same
    priority: int = 10


@dataclass(frozen=True)
class Candidate:
    """One line of `explain`."""

    provider: str
    reasons: tuple[str, ...]  # why it cannot serve; empty = it can
    chosen: bool


@dataclass(frozen=True)
class Bound:
    """A provider chosen for fixed static args. Calling it calls the kernel."""

    op: str
    provider: str
    call: Kernel
    prepare: Callable[[Any], Any]


@dataclass
class Registry:
    """Ops, their references and their providers. `choices` records what was bound, for the start-up log."""

    _providers: dict[str, list[Provider]] = field(default_factory=dict)
    _references: dict[str, Callable[[Any], Kernel]] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)

    def define(self, op: str, reference: Callable[[Any], Kernel], supports: Callable[[Any], list[str]] = _everything) -> None:
        """Define `op` by its reference factory: `reference(args) -> callable`; `supports` says what the definition leaves out."""
        assert op not in self._references, f"op {op} is defined twice"
        self._references[op] = reference
        self._providers.setdefault(op, []).append(Provider(op, "torch", reference, supports, priority=0))

    def register(self, provider: Provider) -> None:
        """Add a provider; order of registration breaks ties of priority."""
        known = self._providers.setdefault(provider.op, [])
        assert all(p.name != provider.name for p in known), f"{provider.op}: provider {provider.name} is registered twice"
        known.append(provider)

    def ops(self) -> list[str]:
        """All defined ops, sorted."""
        return sorted(self._references)

    def reference(self, op: str, args: Any) -> Kernel:
        """The torch reference of `op`, for tests and for composites."""
        return self._references[self._known(op)](args)

    def explain(self, op: str, args: Any, prefer: Mapping[str, str] | None = None) -> list[Candidate]:
        """Each candidate of `op` in order of preference, why it cannot serve `args`, and which one is taken."""
        every = _forced(prefer)
        for name in (*every, op):
            self._known(name)
        forced = every.get(op)
        ordered = sorted(self._providers[op], key=lambda p: -p.priority)
        listed, taken = [], False
        for provider in ordered:
            reasons = provider.supports(args)
            if forced is not None and provider.name != forced:
                reasons = [*reasons, f"{forced} is forced"]
            chosen = not reasons and not taken
            taken = taken or chosen
            listed.append(Candidate(provider.name, tuple(reasons), chosen))
        return listed

    def unserved(self, op: str, args: Any) -> list[str]:
        """Why no provider serves `args`, in the words of the definition; empty: one does, whatever is forced."""
        providers = self._providers[self._known(op)]
        if any(not provider.supports(args) for provider in providers):
            return []
        return next(provider.supports(args) for provider in providers if provider.name == "torch")

    def bind(self, op: str, args: Any, prefer: Mapping[str, str] | None = None) -> Bound:
        """Choose a provider for `args` and bind it.

        Raises:
            ConfigError: a forced provider does not exist or cannot serve `args` (its reasons are named).
        """
        candidates = self.explain(op, args, prefer)
        chosen = next((c for c in candidates if c.chosen), None)
        if chosen is None:
            listed = "; ".join(f"{c.provider}: {', '.join(c.reasons)}" for c in candidates)
            raise ConfigError(f"no provider can serve operator {op} with {args}: {listed}")
        provider = next(p for p in self._providers[op] if p.name == chosen.provider)
        self.choices[op] = provider.name
        return Bound(op, provider.name, provider.bind(args), lambda params: provider.prepare(args, params))

    def _known(self, op: str) -> str:
        if op not in self._references:
            near = nearest(op, self._references, 3)
            raise ConfigError(f"there is no operator {op!r}" + (f": did you mean {near!r}?" if near else ""))
        return op


def _forced(prefer: Mapping[str, str] | None) -> dict[str, str]:
    """Forced providers: `prefer`, overridden by the environment variable HEXAD_OPS ("op=provider,op=provider")."""
    forced = dict(prefer or {})
    for item in filter(None, os.environ.get("HEXAD_OPS", "").split(",")):
        op, separator, name = item.partition("=")
        if not separator:
            raise ConfigError(f"HEXAD_OPS has {item!r}: write op=provider, for instance paged_attention=torch")
        forced[op.strip()] = name.strip()
    return forced


registry = Registry()
