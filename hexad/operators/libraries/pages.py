"""Block tables for libraries that may look up entries which name no page."""

from __future__ import annotations

import torch

from hexad.operators.batch import AttentionBatch


def own_pages(batch: AttentionBatch) -> torch.Tensor:
    """The block table [B, max_blocks] with the row's first page where an entry is -1: behind its last page, since no windows come here.

    Keys there are masked, but a masked value counts 0 times itself, which is not 0 if it is not finite: what another request left in a page
    must not be read. Made once a step.
    """
    if "own_pages" not in batch.scratch:
        table = batch.block_table
        batch.scratch["own_pages"] = torch.where(table < 0, table[:, :1].clamp(min=0), table)
    pages: torch.Tensor = batch.scratch["own_pages"]
    return pages
