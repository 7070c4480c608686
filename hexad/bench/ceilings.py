"""Calibration of what a run measures: the device of an engine in this process, or of a server on this machine; or why there is none."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def note(text: str, quiet: bool = False) -> None:
    """A line on stderr."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def is_here(base_url: str) -> bool:
    """Whether the address is of this machine: a loopback address, or a name that stands for nothing else."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def calibrated_now(device: str, seconds: float) -> dict[str, Any]:
    """What a result says of its device's ceilings ("cpu", "cuda", "cuda:1"), measured for about `seconds` a figure."""
    from hexad.hardware.measure import calibrate

    return {"kind": "cpu" if device == "cpu" else "gpu", **calibrate(device, seconds)}


def calibration_of(
    options: Mapping[str, Any], base_url: str | None, seconds: float, *, quiet: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """(the ceilings that this machine reaches now, why there are none).

    A server at a loopback address is taken to run on this machine's GPU where there is one, unless `options` name the CPU as its device.
    """
    device = str(options.get("device") or "auto")
    if not seconds:
        return None, "--calibration-s is 0"
    if base_url is not None and not is_here(base_url):
        return None, f"the server is on another machine ({urlsplit(base_url).hostname}), whose memory cannot be timed from here"
    if device.startswith("fake"):
        return None, "the device is simulated"
    from hexad.hardware.devices import resolve_device

    on_gpu = resolve_device(device).type == "cuda"
    guess = base_url is not None and device == "auto" and on_gpu
    note("calibrating" + (" this machine's GPU; if the server runs on the processors, say -o device=cpu" if guess else ""), quiet)
    try:
        return calibrated_now("cuda" if on_gpu else "cpu", seconds), None
    except RuntimeError as error:  # out of memory has several names: the allocator's, the context's, a library's handle
        if not on_gpu or base_url is None:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, f"the server leaves the GPU too little memory to time it ({reason}): start it with a lower --gpu-memory-utilization"
