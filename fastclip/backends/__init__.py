# SPDX-License-Identifier: BSD-3-Clause
"""The choice of the backend that serves a device.

A backend named by :func:`use` or by the environment variable FASTCLIP_BACKEND works or raises with the
reason. Without a name the first backend that can serve the device is chosen; :func:`status` reports why the
others are not used.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType, TracebackType

import torch

from . import libraries, native, reference, triton

__all__ = ["status", "use"]

NAMES = ("native", "triton", "reference")
_MODULES: dict[str, ModuleType] = {"native": native, "triton": triton, "reference": reference}
_named: str | None = None
_environment = os.environ.get("FASTCLIP_BACKEND") or "auto"  # read once: looking it up costs a microsecond
_chosen: dict[tuple[str, torch.device], ModuleType] = {}


def _require_name(name: str, source: str) -> str:
    if name not in ("auto", *NAMES):
        raise ValueError(
            f"{source}: expected 'auto' or one of {', '.join(map(repr, NAMES))}, but got {name!r}"
        )
    return name


def name_in_use() -> str:
    """Return the name given to :func:`use`, else FASTCLIP_BACKEND as of the import, else "auto"."""
    return _named or _environment


class use:
    """Set the backend for all calls from now on, or inside a `with` block only.

    Args:
        name: "native", "triton" or "reference"; "auto" chooses the first that can serve the device.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the backend is not available at all. One that cannot serve a certain device raises when
            it is called with gradients on that device.
    """

    def __init__(self, name: str) -> None:
        global _named
        _require_name(name, "backend")
        reason = None
        if name == "native":
            reason = libraries.reason_without_cpu()
        elif name == "triton":
            reason = triton.reason_absent()
        if reason:
            raise RuntimeError(f"backend {name!r} is not available: {reason}")
        self._before = _named
        _named = name

    def __enter__(self) -> use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _named
        _named = self._before


def _first_usable(usable: list[str], device: torch.device) -> str:
    """Return the preferred backend; Triton's interpreter on the CPU is for tests and must be named."""
    return next(n for n in usable if n != "triton" or device.type != "cpu")


def _choose(name: str, device: torch.device) -> ModuleType:
    _require_name(name, "FASTCLIP_BACKEND")
    usable = [n for n in NAMES if _MODULES[n].unavailable(device) is None]
    if name == "auto":
        chosen = _first_usable(usable, device)
        if chosen == "reference" and (reason := libraries.missing_on(device)):
            warnings.warn(
                f"fastclip runs on its plain PyTorch reference, which is slower than torch's own clipping: "
                f"{reason}. Run `python -m fastclip` for details.",
                stacklevel=2,
            )
        return _MODULES[chosen]
    if name not in usable:
        raise RuntimeError(
            f"backend {name!r} cannot serve {device.type} gradients: "
            f"{_MODULES[name].unavailable(device)}; usable there: {', '.join(usable)}"
        )
    return _MODULES[name]


# torch.compile cannot trace this function: marked constant, it is called once while tracing, and a guard on
# the name in use causes a retrace. torch.compiler.assume_constant_result sets the same mark, but imports
# torch._dynamo, which takes seconds.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def select(device: torch.device, norm_type: float = 2.0) -> ModuleType:
    """Return the backend module for gradients on `device`; norms other than 1, 2 and inf use the reference.

    Raises:
        RuntimeError: the named backend cannot serve the device.
    """
    if norm_type not in native.NORM_TYPES:
        return reference
    name = _named or _environment
    if torch.compiler.is_compiling():
        return _choose(name, device)
    key = (name, device)
    if key not in _chosen:
        _chosen[key] = _choose(*key)
    return _chosen[key]


def status(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return for each backend, in order of preference, "in use", "usable" or why it cannot serve `device`."""
    device = torch.device(device)
    name = _require_name(name_in_use(), "FASTCLIP_BACKEND")
    report = {n: _MODULES[n].unavailable(device) or "usable" for n in NAMES}
    in_use = name
    if name == "auto":
        in_use = _first_usable([n for n in NAMES if report[n] == "usable"], device)
    if report[in_use] == "usable":
        report[in_use] = "in use"
    return report
