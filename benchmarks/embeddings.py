# SPDX-License-Identifier: BSD-3-Clause
"""fastclip on an embedding's gradient: dense, and with 99 % of the rows zero."""

from __future__ import annotations

import functools

import fastclip
from fastclip.bench import parity
from fastclip.bench.clip_rows import ClipRow, max_norm_of, untimed_rows
from fastclip.bench.timing import PairedTimes, do_nothing, take_turns
from fastclip.bench.workloads import WORKLOADS, RestorableGradients


def compare(dtype: str) -> list[ClipRow]:
    """Return the unclipped and the clipped row; the dense gradient is first, the zero rows are second."""
    dense, sparse = WORKLOADS["dense_embedding"], WORKLOADS["mostly_zero_embedding"]
    rows = untimed_rows(sparse.name, dtype, 2 * dense.nbytes(dtype))
    if rows[0].note:
        return rows
    pair = [RestorableGradients.of(workload, dtype) for workload in (dense, sparse)]
    norms = [parity.exact_norm(gradients.saved) for gradients in pair]

    def restore() -> None:
        for gradients in pair:
            gradients.restore()

    for row in rows:
        limits = [max_norm_of(norm, row.clipped) for norm in norms]
        try:
            for gradients, max_norm, norm in zip(pair, limits, norms, strict=True):
                parity.check(gradients, fastclip.clip_grad_norm_, max_norm, norm)
        except parity.ParityError as error:
            row.fail(error)
            continue
        calls = [
            functools.partial(fastclip.clip_grad_norm_, gradients.parameters, max_norm)
            for gradients, max_norm in zip(pair, limits, strict=True)
        ]
        row.times = PairedTimes(*take_turns(calls, restore if row.clipped else do_nothing))
    return rows
