# SPDX-License-Identifier: BSD-3-Clause
"""The whole phase of the optimizer: unscaling, clipping, the step; torch's way and with fastclip attached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fastclip
from fastclip.bench import parity
from fastclip.bench.machine import available_memory
from fastclip.bench.rows import limit_of
from fastclip.bench.timing import Times, alternate
from fastclip.bench.workloads import SMOKE, WORKLOADS, Gradients

from . import bars
from .bars import Verdict

_LR = 1e-3
_SCALE = 2.0**10
# Gradients, their copy, parameters, and the two averages of each of two optimizers.
_COPIES = 7


@dataclass(frozen=True)
class Setting:
    """One line of the table. Scaled: gradients of a loss that a GradScaler has scaled, in float32."""

    workload: str
    dtype: str
    fused: bool
    scaled: bool
    clipped: bool

    @property
    def case(self) -> tuple[str, str, bool, bool, bool]:
        return self.workload, self.dtype, self.fused, self.scaled, self.clipped

    @property
    def optimizer(self) -> str:
        return f"AdamW {'fused' if self.fused else 'foreach'}"

    @property
    def torch_passes(self) -> str:
        """What torch does to the gradients, call by call: R reads them, W writes them."""
        return "RW R RW R" if self.scaled else "R RW R"

    @property
    def fastclip_passes(self) -> str:
        """The same. A fused kernel that is given a grad_scale writes what it has divided."""
        changed = self.scaled or self.clipped
        if self.fused:
            return "R RW" if changed else "R R"
        return "R RW R" if changed else "R R"


def bytes_moved(passes: str, nbytes: int) -> int:
    """At least, with the step: it reads and writes the parameters and both averages too."""
    return nbytes * (len(passes.replace(" ", "")) + 6)


@dataclass
class PhaseRow:
    """One setting, measured. Without `times` the note says why."""

    setting: Setting
    nbytes: int
    note: str = ""
    failed: bool = False
    times: tuple[Times, Times] | None = None  # torch, fastclip
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return self.times[0].median_ms / self.times[1].median_ms if self.times else None

    def summary(self) -> dict[str, object]:
        """For the JSON file."""
        s = self.setting
        return {
            "workload": s.workload,
            "dtype": s.dtype,
            "optimizer": s.optimizer,
            "scaled": s.scaled,
            "clipped": s.clipped,
            "note": self.note,
            "torch": self.times[0].summary() if self.times else None,
            "fastclip": self.times[1].summary() if self.times else None,
            "ratio": self.ratio,
            "torch_passes": s.torch_passes,
            "fastclip_passes": s.fastclip_passes,
            "torch_bytes": bytes_moved(s.torch_passes, self.nbytes),
            "fastclip_bytes": bytes_moved(s.fastclip_passes, self.nbytes),
            "bars": {verdict.text: verdict.reached for verdict in self.verdicts},
        }


def settings(names: tuple[str, ...] = ("gpt2_124m", "mid_150")) -> list[Setting]:
    """float32 and bfloat16 without scaling; float32 with, as float16 autocast has it."""
    return [
        Setting(name, dtype, fused, scaled, clipped)
        for name in names
        for dtype, scaled in (("float32", False), ("bfloat16", False), ("float32", True))
        for fused in (True, False)
        for clipped in (False, True)
    ]


class Phase:
    """The two ways over the same parameters and gradients, each with an optimizer of its own.

    `saved` are the true gradients, `exact` their norm.
    """

    def __init__(
        self, setting: Setting, parameters: Sequence[torch.nn.Parameter], saved: list[Tensor], exact: float
    ) -> None:
        self._setting = setting
        self._parameters = parameters
        self._saved = saved
        self._max_norm = limit_of(exact, setting.clipped)
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
        """As torch's documentation has it."""
        scaler, optimizer = self._torch_scaler, self._torch
        if self._setting.scaled:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        scaler.step(optimizer)
        scaler.update()

    def fastclip_call(self) -> None:
        self._scaler.step(self._attached)
        self._scaler.update()

    def restore(self) -> None:
        """Gradients as backward() leaves them: scaled, where there is a scaler."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_copy_(grads, self._saved)
        if self._setting.scaled:
            torch._foreach_mul_(grads, _SCALE)

    def prepare(self) -> None:
        """Before every call; not timed."""
        if self._setting.scaled or self._setting.clipped:
            self.restore()

    def check(self) -> None:
        """The first step of fastclip: its first averages are 0.1 of the clipped, true gradients.

        Raises:
            ParityError: they are not, or the step was left out.
        """
        self.restore()
        self.fastclip_call()
        if self._handle.last_step_applied is not True:
            raise parity.ParityError("the step was not applied")
        for parameter, saved in zip(self._parameters, self._saved, strict=True):
            average: Tensor = self._attached.state[parameter]["exp_avg"]
            eps = torch.finfo(average.dtype).eps
            expected = (saved.float() * (0.1 * self._coef)).to(average)
            if not torch.allclose(average, expected, rtol=4 * eps, atol=0):
                raise parity.ParityError("the optimizer saw gradients other than the clipped ones")
        self.restore()


def measure(setting: Setting) -> PhaseRow:
    """One row, with parameters and averages of its own."""
    workload = WORKLOADS[setting.workload]
    row = PhaseRow(setting, workload.nbytes(setting.dtype))
    if _COPIES * row.nbytes > available_memory():
        row.note = "skipped: not enough memory"
        return row
    gradients = Gradients.of(workload, setting.dtype)
    for parameter in gradients.parameters:
        parameter.data.normal_(std=0.02)
    exact = parity.exact_norm(gradients.saved)
    phase = Phase(setting, gradients.parameters, gradients.saved, exact)
    try:
        phase.check()
    except parity.ParityError as error:
        row.note, row.failed = f"PARITY FAILED: {error}", True
        return row
    phase.torch_call()  # makes its averages
    row.times = alternate(phase.torch_call, phase.fastclip_call, phase.prepare)
    if not SMOKE and row.ratio is not None:
        row.verdicts = bars.judge_phase(setting.case, row.ratio)
    return row
