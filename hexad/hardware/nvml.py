"""The few calls of NVIDIA's management library that measuring needs, through ctypes: no package, no subprocess, nothing is ever set."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

_SM_CLOCK = 1
_GPU_TEMPERATURE = 0


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """A session with the driver, as a context manager. Read-only. Every figure that the driver refuses is None."""

    def __init__(self) -> None:
        self._lib: Any = None

    def __enter__(self) -> Nvml:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return self
        if library.nvmlInit_v2() == 0:
            self._lib = library
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lib is not None:
            self._lib.nvmlShutdown()
            self._lib = None

    @property
    def available(self) -> bool:
        return self._lib is not None

    def device_count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2") or 0

    def driver_version(self) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode() if self._lib.nvmlSystemGetDriverVersion(buffer, 96) == 0 else None

    def driver_cuda(self) -> str | None:
        value = self._number("nvmlSystemGetCudaDriverVersion_v2")
        return f"{value // 1000}.{value % 1000 // 10}" if value else None

    def name(self, index: int) -> str:
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode() if self._lib.nvmlDeviceGetName(self._device(index), buffer, 96) == 0 else "NVIDIA GPU"

    def memory(self, index: int) -> tuple[int, int]:
        """(total, free) bytes."""
        memory = _Memory()
        self._lib.nvmlDeviceGetMemoryInfo(self._device(index), ctypes.byref(memory))
        return int(memory.total), int(memory.free)

    def sm_clock_mhz(self, index: int) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", self._device(index), _SM_CLOCK)

    def sm_clock_max_mhz(self, index: int) -> int | None:
        return self._number("nvmlDeviceGetMaxClockInfo", self._device(index), _SM_CLOCK)

    def power_w(self, index: int) -> float | None:
        return _milli(self._number("nvmlDeviceGetPowerUsage", self._device(index)))

    def power_limit_w(self, index: int) -> float | None:
        return _milli(self._number("nvmlDeviceGetEnforcedPowerLimit", self._device(index)))

    def temperature_c(self, index: int) -> int | None:
        return self._number("nvmlDeviceGetTemperature", self._device(index), _GPU_TEMPERATURE)

    def _device(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _number(self, call: str, *args: Any) -> int | None:
        value = ctypes.c_uint()
        return int(value.value) if getattr(self._lib, call)(*args, ctypes.byref(value)) == 0 else None


def _milli(value: int | None) -> float | None:
    return None if value is None else value / 1000
