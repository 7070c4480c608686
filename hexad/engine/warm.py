"""The kernels that an engine will launch, found without a card and without weights: the network runs over "meta" tensors, once for each
shape of step that the engine makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hexad.common.config import HexadConfig
from hexad.engine.executor.local import LocalExecutor
from hexad.engine.graphs import MAX_PROMPT_TOKENS, row_bucket, token_bucket
from hexad.engine.kv import KVStorage, kv_groups
from hexad.engine.plan import KVLayout
from hexad.engine.sampling.filters import SHORT_LIST
from hexad.engine.sampling.sampler import Sampler
from hexad.models.build import Model, build_model
from hexad.models.formats.dummy import DummyHandle, dummy_handles
from hexad.models.inputs import ForwardInputs, LastTokens
from hexad.models.loader import WeightStore
from hexad.models.spec import ModelSpec
from hexad.operators.args import DrawArgs
from hexad.operators.batch import AttentionBatch
from hexad.operators.draw import DrawOptions
from hexad.operators.load import load_operators

META = torch.device("meta")


class _Unwritten(DummyHandle):
    """A tensor of which only the shape counts."""

    __slots__ = ()

    def _uniform(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(self.full_shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class StepShape:
    """Decode rows, then one prompt (0: none); `shared`: the decode rows share a prefix."""

    decodes: int
    prompt: int = 0
    shared: bool = False


def step_shapes(max_num_seqs: int, max_batched_tokens: int) -> Iterator[StepShape]:
    """One step of every size class: decode buckets, short prompts as captured, long ones and mixed steps as launched one by one."""
    buckets = sorted({row_bucket(rows) for rows in range(1, max_num_seqs + 1)})
    yield from (StepShape(rows) for rows in buckets)
    yield from (StepShape(rows, shared=True) for rows in buckets if rows > 1)
    prompts = {token_bucket(tokens) for tokens in range(1, min(MAX_PROMPT_TOKENS, max_batched_tokens) + 1)}
    prompts |= {size for size in (2, 4, 8, 1024, max_batched_tokens) if size <= max_batched_tokens}
    yield from (StepShape(0, size) for size in sorted(prompts))
    for decodes in {1, min(16, max_num_seqs), max_num_seqs}:
        yield from (StepShape(decodes, size) for size in sorted(prompts) if decodes + size <= max_batched_tokens)


def run_steps(config: HexadConfig, spec: ModelSpec, files: Path) -> None:
    """Call every operator of the network as the engine of `config` (resolved) would. Under `gathering`, each launch is noted."""
    settings = LocalExecutor(config, spec, files, device=META)
    model = build_model(
        spec,
        WeightStore(files, {name: _unwritten(handle) for name, handle in dummy_handles(spec).items()}, spec),
        settings.dtype,
        META,
        config.device.operators,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        max_len=settings.max_model_len,
        quantization=config.model.quantization,
    )
    blocks = -(-settings.max_model_len // settings.block_size) + 1
    kv = KVStorage(KVLayout(num_blocks=blocks, block_size=settings.block_size, groups=kv_groups(spec)), spec, settings.kv_dtype, META)
    sampler = Sampler(settings.vocab_size, spec.vocab_size, 1, META, config.device.operators)
    with torch.inference_mode():
        for shape in step_shapes(settings.max_num_seqs, settings.max_batched_tokens):
            _run(model, kv, sampler, shape, settings)
        sampler.take_best(torch.empty((1, settings.vocab_size), device=META))  # of logits that are edited, drawn from or listed
        _draw(settings.vocab_size, config.device.operators)


def _unwritten(handle: DummyHandle) -> DummyHandle:
    return _Unwritten(handle.name, handle.format, handle.full_shape)


def _run(model: Model, kv: KVStorage, sampler: Sampler, shape: StepShape, settings: LocalExecutor) -> None:
    block_size, max_model_len = settings.block_size, settings.max_model_len
    tokens, rows = shape.decodes + shape.prompt, shape.decodes + (shape.prompt > 0)
    longs = torch.empty(tokens, dtype=torch.int64, device=META)
    batch = AttentionBatch(
        query_start=torch.empty(rows + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(rows, dtype=torch.int32, device=META),
        block_table=torch.empty((rows, -(-max_model_len // block_size)), dtype=torch.int32, device=META),
        slots=longs,
        max_query_len=max(1, shape.prompt),
        max_seq_len=max_model_len,
        block_size=block_size,
        num_decodes=shape.decodes,
        shared_len=torch.empty(1, dtype=torch.int32, device=META) if shape.shared else None,
    )
    groups = len(model.spec.kv_layer_groups)
    last = None
    if shape.prompt > (MAX_PROMPT_TOKENS if not shape.decodes else 1):  # not captured: the last layer goes on with the last tokens alone
        queries = replace(batch, slots=longs[:rows], max_query_len=1, num_decodes=rows, scratch={})
        last = (LastTokens(longs[:rows], queries),) * groups
    hidden = model.forward(ForwardInputs(longs, longs, (batch,) * groups, last), kv.layers)
    sampler.take_best(model.scores(hidden[:rows]))


def _draw(vocab_size: int, operators: dict[str, str]) -> None:
    """Draw at random with options of every kind, with log-probabilities."""
    args = DrawArgs(vocab_size, META.type)
    draw, token_ranks = (load_operators().bind(op, args, operators).call for op in ("draw", "token_ranks"))
    logits = torch.empty((1, vocab_size), device=META)
    floats, longs, doubles = (torch.empty(1, dtype=dtype, device=META) for dtype in (torch.float32, torch.int64, torch.float64))
    for kind in ("dense", "short", "nucleus"):
        longest = min(SHORT_LIST, vocab_size) if kind == "short" else vocab_size
        options = DrawOptions(kind, floats, longs, longs, doubles, longest)
        draw(logits, floats, options, doubles)
    token_ranks(logits, floats, longs, min(5, vocab_size))
