# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of the gradients in a record, from the pass that clips them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backends import reference
from ...optim import Handle
from ...optim.step_plan import StepPlan
from ...policies import Policy
from ..async_copy import Value
from ..parameter_names import ParameterNames

WORST = 3  # gradients that a record names
HISTOGRAM_EVERY = 100  # steps


def limit_of(handle: Handle) -> dict[str, Value]:
    """Return the limit in force, the smallest one of several, as "max_norm"; nothing without one."""
    limit: Any = handle.max_norm
    if isinstance(limit, Policy):
        limit = limit.threshold
    if isinstance(limit, Mapping):
        limit = min(limit.values(), default=None)
    if isinstance(limit, Tensor):
        limit = limit.min().clone()  # the next step may change it before it has been copied
    return {} if limit is None else {"max_norm": limit}


@torch.no_grad()
def numbers_of(plan: StepPlan, with_norms: bool) -> dict[str, Value]:
    """Return the numbers of the pass by name, as tensors on its device."""
    stats, summary, inputs = plan.stats, plan.summary, plan.inputs
    order = stats[:, 0]
    # A finite norm that the host knows means that all elements are finite, unless only those were used.
    healthy = inputs.mode != "zero" and inputs.norm_type > 0 and summary.device.type == "cpu"
    values: dict[str, Value] = {"summary": summary}
    if not (healthy and bool(summary[:, 0].isfinite().all())):
        bad = stats[:, 1:]
        totals = plan.totals  # with process groups the rows are not all there is
        values["counts"] = bad.sum(0) if totals is None else totals[0][:, 1:].sum(0)
        # Those that hold NaN or Inf first, the one with the most in front.
        unit = torch.finfo(order.dtype).max / 1e12
        order = torch.where(bad.sum(1) > 0, unit * bad.sum(1).clamp(max=1e12), order)
    values["worst_index"] = index = order.topk(min(WORST, len(stats))).indices
    values["worst"] = stats[index]
    if plan.inv_scale is not None:
        values["inv_scale"] = plan.inv_scale
    if with_norms:
        values["tensor_norms"] = reference.totals(stats, inputs.norm_type, range(len(stats)))
    if (nonfinite_per_rank := plan.nonfinite_per_rank) is not None:
        values["nonfinite_per_rank"] = nonfinite_per_rank
    return values


@dataclass
class GradientRecord:
    """What the host knows of the pass, without gradients and statistics, which it would keep alive."""

    parameters: list[Tensor]
    labels: Sequence[Hashable]
    norm_type: float
    with_norms: bool

    @classmethod
    def of(cls, plan: StepPlan, with_norms: bool) -> GradientRecord:
        inputs = plan.inputs
        return cls(inputs.parameters, inputs.labels, inputs.norm_type, with_norms)


def fields_of(values: dict[str, Any], inputs: GradientRecord, names: ParameterNames) -> dict[str, Any]:
    """Return the fields of a record from the numbers of the pass, which are on the host."""
    inv_scale = values.get("inv_scale", 1.0)
    while isinstance(inv_scale, list):
        inv_scale = inv_scale[0]
    summary, counts = values["summary"], values.get("counts", (0, 0))
    coefficients = [row[1] for row in summary if len(row) > 1]
    found: dict[str, Any] = {
        "total_norm": _combine([row[0] for row in summary], inputs.norm_type),
        "nan_count": int(counts[0]),
        "inf_count": int(counts[1]),
        "clip_coef": min(coefficients, key=lambda c: math.inf if math.isnan(c) else c, default=None),
        "nonfinite_ranks": [
            rank for rank, count in enumerate(values.get("nonfinite_per_rank", [])) if count > 0
        ],
    }
    if inputs.labels and len(inputs.labels) < len(inputs.parameters):
        labelled = zip(inputs.labels, summary, strict=True)
        found["group_norms"] = {str(label): row[0] for label, row in labelled}
    found["worst"] = [
        {
            "name": names[inputs.parameters[int(index)]],
            "norm": _root(row[0], inputs.norm_type) * inv_scale,
            "nan_count": int(row[1]),
            "inf_count": int(row[2]),
        }
        for index, row in zip(values["worst_index"], values["worst"], strict=True)
    ]
    if inputs.with_norms:
        found["tensor_norms"] = [norm * inv_scale for norm in values["tensor_norms"]]
        found["tensor_names"] = [names[parameter] for parameter in inputs.parameters]
    return found


def _root(power_sum: float, norm_type: float) -> float:
    if math.isinf(norm_type) or norm_type == 0 or not math.isfinite(power_sum):
        return power_sum
    return power_sum ** (1 / norm_type) if power_sum > 0 else 0.0


def _combine(norms: list[float], norm_type: float) -> float:
    """Combine the norms of groups into one."""
    if len(norms) == 1:
        return norms[0]
    if math.isinf(norm_type):
        return max(norms) if norm_type > 0 else min(norms)
    if norm_type == 0:
        return math.fsum(norms)
    return math.fsum(norm**norm_type for norm in norms) ** (1 / norm_type)
