"""Profiles: scheduler settings for a kind of traffic. A value that the user sets wins over the profile's. No torch.

Each names why; `hexad config show` and the start-up log can print the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hexad.common.errors import ConfigError, nearest


@dataclass(frozen=True)
class Preset:
    """Values by "section.key" and what they are for."""

    name: str
    purpose: str
    values: dict[str, Any]
    reasons: dict[str, str]


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "chat",
            "short time to first token and steady streams",
            {"scheduler.max_num_batched_tokens": 2048, "scheduler.max_prefill_tokens_per_step": 1024, "cache.enable_prefix_caching": True},
            {
                "scheduler.max_num_batched_tokens": "a step stays short, so that running streams do not stall",
                "scheduler.max_prefill_tokens_per_step": "a long prompt is cut, so that others get their token meanwhile",
                "cache.enable_prefix_caching": "a conversation repeats its beginning at every turn",
            },
        ),
        Preset(
            "batch",
            "most tokens a second, whatever the single request waits",
            {"scheduler.max_num_batched_tokens": 16384, "scheduler.max_num_seqs": 512, "cache.gpu_memory_utilization": 0.94},
            {
                "scheduler.max_num_batched_tokens": "large steps keep the arithmetic units full",
                "scheduler.max_num_seqs": "more sequences share each reading of the weights",
                "cache.gpu_memory_utilization": "nothing else needs the device: more room for keys and values",
            },
        ),
        Preset(
            "agent",
            "many calls with one long common beginning",
            {
                "scheduler.max_num_batched_tokens": 4096,
                "scheduler.max_prefill_tokens_per_step": 2048,
                "cache.enable_prefix_caching": True,
                "scheduler.scheduling_policy": "fair",
            },
            {
                "scheduler.max_num_batched_tokens": "between chat and batch",
                "scheduler.max_prefill_tokens_per_step": "a tool's long answer does not stop the other agents",
                "cache.enable_prefix_caching": "system prompt and tools are computed once",
                "scheduler.scheduling_policy": "one busy agent must not starve the others",
            },
        ),
    )
}


def find_preset(name: str) -> Preset:
    """The profile called `name`.

    Raises:
        ConfigError: no such profile.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = nearest(name, PRESETS, 3)
    raise ConfigError(f"there is no profile {name!r}: " + (f"did you mean {near!r}?" if near else f"known are {', '.join(PRESETS)}"))
