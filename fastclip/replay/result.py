# SPDX-License-Identifier: BSD-3-Clause
"""The result of a replay, and the sentences that explain it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..monitor.sinks.json_numbers import spell_nonfinite
from .bisect import SampleReport
from .compare import ComparedNumber
from .nan_trace import BadModule

_SHOWN = 5
_TENTHS = {
    "a_tenth_in_the_step_before": "in the step before",
    "a_tenth_in_all_steps": "in all steps since the snapshot",
}


@dataclass
class ReplayResult:
    """The result of a replay.

    Attributes:
        reproduced: whether all recorded numbers of the step were reproduced within `tolerance`.
        tolerance: the relative difference allowed; 0: equal to the last bit.
        compared: the numbers, recorded and replayed; `differences` has a sentence on each that differs.
        failure: the failure of the recorded step, or None. `fails`: whether the replay shows it.
        forward, backward: the first modules with NaN or Inf.
        parameters: parameters whose gradients hold NaN or Inf, with the counts.
        bad_state: parameters, buffers and optimizer state that held NaN or Inf before the step.
        samples: losses of single samples, and minimal failing subsets.
        float32, learning_rate, history: variants of the step; None if they were not run.
        earlier: batches of earlier steps, with their losses as recorded and with the current parameters.
        verdict: the conclusions, in sentences; `notes`: what limits them.
    """

    path: str
    step: int
    kind: str
    message: str
    ranks: list[int]
    world_size: int
    reproduced: bool = False
    tolerance: float = 0.0
    compared: list[ComparedNumber] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None
    fails: bool = False
    forward: BadModule | None = None
    backward: BadModule | None = None
    parameters: list[dict[str, Any]] = field(default_factory=list)
    bad_state: list[str] = field(default_factory=list)
    samples: SampleReport | None = None
    float32: dict[str, Any] | None = None
    learning_rate: dict[str, Any] | None = None
    earlier: list[dict[str, Any]] = field(default_factory=list)
    history: dict[str, Any] | None = None
    verdict: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loss_scale: float | None = None
    runs: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, with NaN and Inf as strings."""
        return spell_nonfinite(asdict(self))

    def __str__(self) -> str:
        how = "bit for bit" if self.tolerance == 0 else f"within {self.tolerance:g}"
        lines = [f"step {self.step}: {self.kind}: {self.message}"]
        lines.append(f"  {'reproduced, ' + how if self.reproduced else 'NOT reproduced'}")
        lines += [f"  {sentence}" for sentence in self.verdict]
        if self.differences:
            lines.append("differences")
            lines += [f"  {text}" for text in _few(self.differences)]
        lines += _section("compared", [str(c) for c in self.compared if c.same][:4])
        where = [f"forward   {self.forward}"] if self.forward else []
        # After a bad forward every gradient is bad.
        where += [f"backward  {self.backward}"] if self.backward and not self.forward else []
        bad = [f"gradient  {p['name']}: {p['nan_count']} NaN, {p['inf_count']} Inf" for p in self.parameters]
        lines += _section("first NaN or Inf", where + _few(bad))
        lines += _section("samples", self._samples())
        lines += _section("variants", self._variants())
        lines += _section("notes", self.notes)
        lines.append(f"{self.runs} runs in {self.seconds:.1f} s")
        return "\n".join(lines)

    def _samples(self) -> list[str]:
        if self.samples is None:
            return []
        lines = [f"loss {s['loss']:.6g}  id {s['id']}" for s in self.samples.losses[:_SHOWN]]
        return lines + self.samples.notes

    def _variants(self) -> list[str]:
        lines = []
        if (single := self.float32) is not None:
            outcome = "the failure vanishes" if single["vanishes"] else "the failure stays"
            lines.append(
                f"in float32: {outcome}: loss {single['loss']:.6g}, norm {_number(single['total_norm'])}"
            )
        if (rate := self.learning_rate) is not None:
            lines.append(
                f"the update of the step: loss {rate['before']:.6g} -> {rate['after']:.6g}, "
                f"at a tenth of the learning rate {rate['after_a_tenth']:.6g}"
            )
        for batch in self.earlier[-2:]:
            losses = f"loss {batch['recorded']:.6g} as recorded, {batch['now']:.6g} now"
            lines.append(f"batch of step {batch['step']}: {losses}")
        if (history := self.history) is not None:
            for name, where in _TENTHS.items():
                if name in history:
                    text = "the failure vanishes" if history[name]["vanishes"] else "the failure stays"
                    lines.append(
                        f"a tenth of the learning rate {where}: {text}: loss {history[name]['loss']:.6g}"
                    )
        return lines


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _few(lines: list[str]) -> list[str]:
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def _no_article(failure: str) -> str:
    return failure.removeprefix("a ")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def explain(result: ReplayResult) -> list[str]:
    """Return the conclusions in sentences, the most credible cause first.

    The order is: parameters that were bad before the step, data, precision, learning rate. Without any of
    these the sentence says where the failure first appears.
    """
    if not result.reproduced:
        more = f" and {len(result.differences) - 1} more" if len(result.differences) > 1 else ""
        first = result.differences[0] if result.differences else "no recorded number can be compared"
        sentences = [f"does not reproduce: {first}{more}"]
        if result.failure is not None and not result.fails:
            return [*sentences, f"the replay shows no {_no_article(result.failure)}"]
    else:
        sentences = []
    if result.failure is None:
        return sentences + (
            _update(result) or ["reproduced; neither the loss nor the gradients show a failure"]
        )
    causes = _causes(result)
    if not causes:
        where = result.forward or result.backward
        place = f"; NaN or Inf first appears in {where}" if where else ""
        causes = [f"no single cause was found for {result.failure}{place}"]
    return sentences + causes


def _causes(result: ReplayResult) -> list[str]:
    if result.bad_state:
        names = ", ".join(_few(result.bad_state))
        return [f"NaN or Inf was present before the step, in {names}: an earlier step is the cause"]
    causes = []
    rates, report = _rates(result), result.samples
    # After a bad update some samples are always worse than others.
    if report is not None and report.is_cause and (report.has_bad_data or not rates):
        causes.append(_sample_sentence(report))
    if (single := result.float32) is not None and single["vanishes"]:
        causes.append(_precision_sentence(result, single))
    return causes + rates


def _sample_sentence(report: SampleReport) -> str:
    guilty = [sample for subset in report.guilty for sample in subset]
    together = " together" if len(report.guilty) == 1 and len(guilty) > 1 else ""
    causes = "causes" if len(guilty) == 1 else "cause"
    ids = ", ".join(str(sample["id"]) for sample in guilty)
    holds = [f"{n} in {name}" for sample in guilty for name, n in sample["nonfinite"].items()]
    data = f", with NaN or Inf in the data ({', '.join(holds[:_SHOWN])})" if holds else ""
    return f"{len(guilty)} of {report.count} samples {causes} it{together}: id {ids}{data}"


def _precision_sentence(result: ReplayResult, single: dict[str, Any]) -> str:
    now = f"finite in float32 (loss {single['loss']:.4g}, norm {_number(single['total_norm'])})"
    if result.failure is not None and not result.failure.startswith("NaN"):
        return f"{single['dtype']} precision: in float32 there is no {_no_article(result.failure)}"
    scaled = result.forward is None and result.loss_scale not in (None, 1.0)
    where = f" of the gradients at a loss scale of {result.loss_scale:g}" if scaled else ""
    return f"{single['dtype']} overflow{where}: {now}"


def _rates(result: ReplayResult) -> list[str]:
    history = result.history or {}
    before = history.get("a_tenth_in_the_step_before")
    if before is not None and before["vanishes"]:
        rates = ", ".join(f"{rate:g}" for rate in history.get("rates_of_the_step_before", []))
        return [
            f"the learning rate of the step before (step {result.step - 1}{': ' + rates if rates else ''}): "
            f"at a tenth of it, the loss of step {result.step} is {before['loss']:.4g}"
        ]
    everywhere = history.get("a_tenth_in_all_steps")
    if everywhere is not None and everywhere["vanishes"]:
        first = history["from_step"]
        return [
            f"the learning rate of steps {first} to {result.step - 1}: at a tenth of it, the loss of step "
            f"{result.step} is {everywhere['loss']:.4g}"
        ]
    if result.earlier:
        last = result.earlier[-1]
        if _exploded(last["recorded"], last["now"]):
            return [
                f"the parameters, not this batch: the loss of the batch of step {last['step']} was "
                f"{last['recorded']:.4g} and is {last['now']:.4g} with the current parameters"
            ]
    return []


def _update(result: ReplayResult) -> list[str]:
    rate = result.learning_rate
    if rate is None or not _exploded(rate["before"], rate["after"]):
        return []
    return [
        f"its own update raises the loss on its batch from {rate['before']:.4g} to {rate['after']:.4g}; at a "
        f"tenth of the learning rate, to {rate['after_a_tenth']:.4g}"
    ]


def _exploded(before: float, after: float) -> bool:
    """Return whether a loss has more than doubled, or has become non-finite."""
    if not math.isfinite(before):
        return False
    return not math.isfinite(after) or after - before > max(abs(before), 1e-6)
