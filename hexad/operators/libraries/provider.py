"""Registers attention of installed libraries: FlashAttention 4 (package flash-attn-4) and FlashInfer (flashinfer-python). Both optional.

They stand behind the package's own kernels, which are chosen unless someone says otherwise: `hexad bench kernels --op paged_attention`
times all that serve, and `HEXAD_OPS=paged_attention=flash_attn` (or `operators` in the configuration) takes one. It then computes the
prompts of a step if one has over 512 tokens in it (`PromptAttention`). `measured` in place of a name leaves the choice to a measurement
of those that are installed (`Fastest`). Importing this module imports neither library.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.registry import Kernel, Provider, registry
from hexad.operators.triton.provider import attention_reasons


def _of_flash_attn(args: AttentionArgs, capability: int) -> list[str]:
    """What FlashAttention 4 leaves out when keys are paged."""
    if args.head_dim % 16 or args.head_dim > 256:
        return [f"head size {args.head_dim} is not a multiple of 16 up to 256"]
    if capability >= 100 and 128 < args.head_dim < 256:
        return [f"head size {args.head_dim} is over 128 on a card of this kind"]
    if capability // 10 == 12:
        return ["it does not page keys on a card of this kind"]
    if args.block_size >= 128:
        # it then copies whole pages, in whose last one a number that is not finite, left by another request, would reach the result
        return [f"pages of {args.block_size} with heads of {args.head_dim} are read beyond a row's last key"]
    return []


def _of_flashinfer(args: AttentionArgs, _capability: int) -> list[str]:
    return [] if args.head_dim in (64, 128, 256) else [f"head size {args.head_dim} is not 64, 128 or 256"]


@dataclass(frozen=True)
class Library:
    """One library: what to look for, what it serves."""

    package: str  # that pip installs
    module: str
    least_capability: int
    unserved: Callable[[AttentionArgs, int], list[str]]


LIBRARIES = {
    "flash_attn": Library("flash-attn-4", "flash_attn.cute", 90, _of_flash_attn),
    "flashinfer": Library("flashinfer-python", "flashinfer", 80, _of_flashinfer),
}
HALVES = (torch.bfloat16, torch.float16)
MEASURED = "measured"
PRIORITY = 40  # below the own kernels


@functools.cache
def installed(name: str) -> bool:
    """Whether the library's package and module are there; the module is not imported (what is around it may be)."""
    try:
        importlib.metadata.version(LIBRARIES[name].package)  # older packages may have a module of that name
        return importlib.util.find_spec(LIBRARIES[name].module) is not None
    except (ImportError, ValueError):  # there is no such package, or no such module in it
        return False


def reasons_of(name: str, args: AttentionArgs) -> list[str]:
    """Why the library does not serve this attention here; empty: it does."""
    library, reasons, capability = LIBRARIES[name], [], _capability()
    if args.device_type != "cuda":
        reasons.append(f"tensors are on {args.device_type}, not on cuda")
    elif torch.version.hip is not None:
        reasons.append("these kernels were written for NVIDIA cards")
    elif capability and capability < library.least_capability:
        reasons.append("the card is older than compute capability {}.{}".format(*divmod(library.least_capability, 10)))
    if args.dtype not in HALVES:
        reasons.append(f"queries are in {args.dtype}, not in float16 or bfloat16")
    if args.window is not None:  # seen on a card: both read masked values there
        reasons.append("what other requests left in pages before a window would reach the result")
    if args.kv_dtype != args.dtype:
        reasons.append(f"pages are in {args.kv_dtype}, queries in {args.dtype}")
    reasons += library.unserved(args, capability)
    if not reasons and not installed(name):
        reasons.append(f"{library.package} is not installed")
    if not reasons:  # the own kernels compute the rest of each step
        reasons += attention_reasons(args) if importlib.util.find_spec("triton") is not None else ["Triton is not installed"]
    return reasons


def _capability() -> int:
    """This machine's card: 90 is a Hopper; 0: there is none."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def reasons_of_measured(args: AttentionArgs) -> list[str]:
    """Why there is nothing to choose from; empty: a library serves."""
    listed = {library.package: reasons_of(name, args) for name, library in LIBRARIES.items()}
    if not all(listed.values()):
        return []
    return ["no library serves: " + "; ".join(f"{package}: {', '.join(reasons)}" for package, reasons in listed.items())]


def _register(name: str, supports: Callable[[AttentionArgs], list[str]], priority: int) -> None:
    def bind(args: AttentionArgs) -> Kernel:
        kernel: Kernel = importlib.import_module("hexad.operators.libraries.prompts").bind(name, args)
        return kernel

    registry.register(Provider("paged_attention", name, bind, supports, priority=priority))


for _name in LIBRARIES:
    _register(_name, functools.partial(reasons_of, _name), PRIORITY)
_register(MEASURED, reasons_of_measured, PRIORITY - 1)
