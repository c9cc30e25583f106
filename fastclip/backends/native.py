# SPDX-License-Identifier: BSD-3-Clause
"""The compiled ops: loading the library, their shapes for tracing, and thin calls.

An error found in C++ is raised before anything is written. The calls bump version counters, which writing
through raw pointers does not do by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

OLDEST_TORCH = (2, 10)
NORM_TYPES = (1.0, 2.0, float("inf"))
LIBRARY = Path(__file__).parent.parent / "libfastclip_cpu.so"


# Written by setup.py: what it compiled, what it did not, and why.
BUILD_REPORT = Path(__file__).parent.parent / "_build_report.txt"


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _reason_absent() -> str | None:
    if _torch_version() < OLDEST_TORCH:
        return f"the library needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, this is {torch.__version__}"
    if not LIBRARY.exists():
        return f"the library was not built ({build_report()})"
    return None


def build_report() -> str:
    """What setup.py said of its decision, in one line."""
    if not BUILD_REPORT.exists():
        return "no build report: the package was not installed by its setup.py"
    return BUILD_REPORT.read_text(encoding="utf-8").strip()


def missing_on(device: torch.device) -> str | None:
    """Why the library, wanted on this device and with this torch, is not there. None if nobody misses it."""
    wanted = device.type == "cpu" and _torch_version() >= OLDEST_TORCH
    if not wanted or LIBRARY.exists() or "FASTCLIP_BUILD=none" in build_report():
        return None
    return _reason_absent()


def _already_defined() -> bool:
    return bool(torch._C._jit_get_schemas_for_operator("fastclip::clip_"))


def load() -> None:
    """Load the library once. A second one in a process would end it, so that is refused.

    Raises:
        ImportError: another copy of the library has defined the ops.
    """
    if _reason_absent() is not None or str(LIBRARY) in torch.ops.loaded_libraries:
        return
    if _already_defined():
        others = [p for p in torch.ops.loaded_libraries if Path(p).name == LIBRARY.name]
        raise ImportError(
            f"expected to load {LIBRARY}, but its ops are already defined by "
            f"{', '.join(others) or 'another library'}; a process can use only one copy of fastclip"
        )
    torch.ops.load_library(LIBRARY)
    _register_fakes()


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve the device, or None if it can."""
    if device.type != "cpu":
        return f"no kernels for {device.type}"
    return _reason_absent()


def cpu_capability() -> str:
    """The instruction set in use; FASTCLIP_CPU_CAPABILITY names another one."""
    return torch.ops.fastclip.cpu_capability()


def _register_fakes() -> None:
    def stats_like(grads: list[Tensor]) -> Tensor:
        return grads[0].new_empty((len(grads), 3), dtype=torch.float64)

    def result_like(grads: list[Tensor], *sizes: int) -> Tensor:
        wide = any(g.dtype == torch.float64 for g in grads)
        return grads[0].new_empty(sizes, dtype=torch.float64 if wide else torch.float32)

    def group_count(groups: Sequence[int]) -> int:
        return max(groups) + 1 if groups else 1

    @torch.library.register_fake("fastclip::grad_stats")
    def _(
        grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        return result_like(grads, group_count(groups)), stats_like(grads)

    @torch.library.register_fake("fastclip::clip_")
    def _(
        grads: list[Tensor],
        max_norm: float,
        norm_type: float,
        nonfinite: str,
        groups: Sequence[int] = (),
        max_norm_tensor: Tensor | None = None,
        inv_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return result_like(grads, group_count(groups), 3), stats_like(grads)

    @torch.library.register_fake("fastclip::scale_")
    def _(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
        return None

    @torch.library.register_fake("fastclip::clamp_")
    def _(grads: list[Tensor], limit: float) -> None:
        return None


def _as_numbers(value: Tensor) -> Tensor:
    """A small tensor as the ops take it: float64 on the CPU, contiguous, one-dimensional."""
    return value.detach().to("cpu", torch.float64).reshape(-1).contiguous()


def grad_stats(
    grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`."""
    return torch.ops.fastclip.grad_stats.default(grads, norm_type, finite_only, groups)


def scale_(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """See :func:`fastclip.backends.reference.scale_`."""
    torch.ops.fastclip.scale_.default(grads, _as_numbers(scale), zero_nonfinite)
    torch.autograd.graph.increment_version(grads)


def clip_(
    grads: list[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.clip_`."""
    max_norm_tensor: Tensor | None = None
    if isinstance(max_norm, Tensor):
        max_norm_tensor = _as_numbers(max_norm)
        max_norm = 0.0
    if inv_scale is not None:
        inv_scale = _as_numbers(inv_scale)
    results = torch.ops.fastclip.clip_.default(
        grads, max_norm, norm_type, nonfinite, groups, max_norm_tensor, inv_scale
    )
    torch.autograd.graph.increment_version(grads)
    return results


def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`."""
    if limit != limit:  # as in torch, a NaN limit makes everything NaN
        return scale_(grads, torch.tensor(limit))
    torch.ops.fastclip.clamp_.default(grads, limit)
    torch.autograd.graph.increment_version(grads)
