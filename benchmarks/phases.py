# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer phase: unscaling, clipping and the step, torch's way and with fastclip attached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fastclip
from fastclip.bench import parity
from fastclip.bench.clip_rows import TimedRow, max_norm_of
from fastclip.bench.machine import available_memory
from fastclip.bench.timing import Call, PairedTimes, take_turns
from fastclip.bench.workloads import CPU, WORKLOADS, RestorableGradients, Workload

# Of the gradients' bytes: gradients, their copy, parameters, and two averages of each of two optimizers.
COPIES = 7

_LR = 1e-3
_SCALE = 2.0**10


@dataclass(frozen=True)
class PhaseSetting:
    """What one row measures. If scaled, a GradScaler has scaled the loss, and the gradients with it."""

    workload: Workload
    dtype: str
    fused: bool
    scaled: bool
    clipped: bool

    @property
    def case(self) -> tuple[str, str, bool, bool, bool]:
        """The key of this setting's bar."""
        return self.workload.name, self.dtype, self.fused, self.scaled, self.clipped

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients."""
        return self.workload.nbytes(self.dtype)

    @property
    def optimizer(self) -> str:
        return f"AdamW {'fused' if self.fused else 'foreach'}"

    @property
    def torch_passes(self) -> str:
        """The passes of torch's calls over the gradients: R reads them, W writes them."""
        return "RW R RW R" if self.scaled else "R RW R"

    @property
    def fastclip_passes(self) -> str:
        """The passes of fastclip. A fused kernel that gets a grad_scale writes the divided gradients."""
        changed = self.scaled or self.clipped
        if self.fused:
            return "R RW" if changed else "R R"
        return "R RW R" if changed else "R R"


def bytes_moved(passes: str, nbytes: int) -> int:
    """Return the least bytes that move; the step also reads and writes parameters and both averages."""
    return nbytes * (len(passes.replace(" ", "")) + 6)


@dataclass
class PhaseRow(TimedRow):
    """The times of one setting: torch's first, fastclip's second."""

    setting: PhaseSetting

    def summary(self) -> dict[str, object]:
        """Return what the JSON file has of this row."""
        s = self.setting
        return {
            "workload": s.workload.name,
            "dtype": s.dtype,
            "optimizer": s.optimizer,
            "scaled": s.scaled,
            "clipped": s.clipped,
            "note": self.note,
            "torch": self.times.first.summary() if self.times else None,
            "fastclip": self.times.second.summary() if self.times else None,
            "ratio": self.ratio,
            "torch_passes": s.torch_passes,
            "fastclip_passes": s.fastclip_passes,
            "torch_bytes": bytes_moved(s.torch_passes, s.nbytes),
            "fastclip_bytes": bytes_moved(s.fastclip_passes, s.nbytes),
        }


def settings(
    workloads: Sequence[Workload] = (WORKLOADS["gpt2_124m"], WORKLOADS["mid_150"]),
) -> list[PhaseSetting]:
    """Return float32 and bfloat16 without loss scaling, and float32 with it, as under float16 autocast."""
    return [
        PhaseSetting(workload, dtype, fused, scaled, clipped)
        for workload in workloads
        for dtype, scaled in (("float32", False), ("bfloat16", False), ("float32", True))
        for fused in (True, False)
        for clipped in (False, True)
    ]


class OptimizerPhase:
    """Both ways over the same parameters and gradients, each with an optimizer of its own."""

    def __init__(self, setting: PhaseSetting, gradients: RestorableGradients) -> None:
        exact = parity.exact_norm(gradients.saved)
        self._setting = setting
        self._gradients = gradients
        self._parameters = parameters = gradients.parameters
        self._max_norm = max_norm_of(exact, setting.clipped)
        self._coef = min(1.0, self._max_norm / (exact + 1e-6))
        self._torch = self._make_optimizer()
        self._attached = self._make_optimizer()
        device = parameters[0].device.type
        options = {"init_scale": _SCALE, "growth_interval": 1 << 30, "enabled": setting.scaled}
        self._torch_scaler = torch.amp.GradScaler(device, **options)
        self._scaler = fastclip.GradScaler(device, **options)
        for scaler in (self._torch_scaler, self._scaler):
            scaler.scale(torch.zeros((), device=device))
        self._handle = fastclip.attach(self._attached, self._max_norm, scaler=self._scaler)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        chosen = {"fused": True} if self._setting.fused else {"foreach": True}
        return torch.optim.AdamW(self._parameters, lr=_LR, **chosen)

    def torch_call(self) -> None:
        """Unscale, clip and step as in torch's documentation."""
        scaler, optimizer = self._torch_scaler, self._torch
        if self._setting.scaled:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        scaler.step(optimizer)
        scaler.update()

    def fastclip_call(self) -> None:
        """Step with the attached optimizer, which unscales and clips."""
        self._scaler.step(self._attached)
        self._scaler.update()

    def restore(self) -> None:
        """Set the gradients as backward() leaves them: scaled, if there is loss scaling."""
        self._gradients.restore()
        if self._setting.scaled:
            torch._foreach_mul_(self._gradients.grads, _SCALE)

    def prepare(self) -> None:
        """Restore the gradients that a call changes; run before every call, outside the time."""
        if self._setting.scaled or self._setting.clipped:
            self.restore()

    def check(self) -> None:
        """Make fastclip's first step and check its averages: they are 0.1 of the clipped true gradients.

        Raises:
            ParityError: they are not, or the step was skipped.
        """
        self.restore()
        self.fastclip_call()
        if self._handle.last_step_applied is not True:
            raise parity.ParityError("the step was not applied")
        for parameter, saved in zip(self._parameters, self._gradients.saved, strict=True):
            average: Tensor = self._attached.state[parameter]["exp_avg"]
            eps = torch.finfo(average.dtype).eps
            expected = (saved.float() * (0.1 * self._coef)).to(average)
            if not torch.allclose(average, expected, rtol=4 * eps, atol=0):
                raise parity.ParityError("the optimizer saw gradients other than the clipped ones")
        self.restore()


def checked_phase(setting: PhaseSetting, device: torch.device = CPU) -> OptimizerPhase:
    """Return a phase whose result was checked and whose optimizers have made their averages.

    Raises:
        ParityError: fastclip's step did not use the clipped gradients.
    """
    gradients = RestorableGradients.of(setting.workload, setting.dtype, device)
    for parameter in gradients.parameters:
        parameter.data.normal_(std=0.02)
    phase = OptimizerPhase(setting, gradients)
    phase.check()
    phase.torch_call()
    return phase


def measure(setting: PhaseSetting) -> PhaseRow:
    """Return the row of one setting."""
    row = PhaseRow(setting)
    if COPIES * setting.nbytes > available_memory():
        row.note = "skipped: not enough memory"
        return row
    try:
        phase = checked_phase(setting)
    except parity.ParityError as error:
        row.fail(error)
        return row
    calls: tuple[Call, Call] = (phase.torch_call, phase.fastclip_call)
    row.times = PairedTimes(*take_turns(calls, phase.prepare))
    return row
