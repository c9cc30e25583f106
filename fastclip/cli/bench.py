# SPDX-License-Identifier: BSD-3-Clause
"""Time fastclip's clip_grad_norm_ against torch's on this machine.

Both run in turns in this process on the same gradients, unclipped and clipped. Norms and gradients are held
against float64 first: a row with a wrong result gets no time. With --model the gradients are those of your
own model: the function is called without arguments and returns (model, optimizer, loss_function) as for
`fastclip replay`; modules of the working directory can be imported. Values are random and no training runs.

Exit status: 0, 1 if a result was wrong, 2 if it cannot begin.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

import torch
from torch import nn

from ..bench import machine, table
from ..bench.rows import Row, measure, no_memory
from ..bench.timing import Bandwidth
from ..bench.workloads import DTYPES, SMOKE, WORKLOADS, Gradients
from ..replay.build import ReplayError, build_subject
from .building import function_named, importable

_BY_DEFAULT = ("gpt2_124m", "llama_1b", "many_tiny", "mid_150")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=tuple(WORKLOADS),
        metavar="NAME",
        help=f"any of {', '.join(WORKLOADS)} (default: {', '.join(_BY_DEFAULT)}; with --model none)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="NAME",
        help=f"of the workloads: any of {', '.join(DTYPES)} (default: all; llama_1b in bfloat16)",
    )
    device = "of the workloads: cpu, cuda:1, ... (default: a GPU if there is one)"
    parser.add_argument("--device", help=device)
    model = "what makes your model, such as train:build"
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help=model)
    parser.add_argument("--json", metavar="FILE", help="write the results here")


def run(options: argparse.Namespace) -> int:
    busy = machine.is_busy()
    try:
        device = _device(options.device)
        parameters = None if options.model is None else _parameters(options.model)
        file = None if options.json is None else open(options.json, "w", encoding="utf-8")
    except (ReplayError, ValueError, OSError) as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
    if parameters is not None and options.device is None:
        device = parameters[0].device
    names = options.workload or (_BY_DEFAULT if parameters is None else ())
    described = machine.describe(device)
    print("\n".join(f"{key:18}{value}" for key, value in described.items()))
    print(f"\n{table.header()}")
    rows = []
    bandwidth = Bandwidth(device)
    for row in _measured(names, options.dtype, bandwidth, options.model, parameters):
        print(table.row_line(row), flush=True)
        rows.append(row)
    print(table.NOTES)
    if busy:
        print(f"\n{table.BUSY}")
    if SMOKE:
        print("\nFASTCLIP_BENCH_SMOKE is set: the gradients are tiny and the figures mean nothing.")
    if file is not None:
        found = {"machine": described, "busy": busy, "smoke": SMOKE, "rows": [r.summary() for r in rows]}
        with file:
            json.dump(found, file, indent=1, allow_nan=False)
            file.write("\n")
    return int(any(row.failed for row in rows))


def _measured(
    names: tuple[str, ...],
    dtypes: tuple[str, ...] | None,
    bandwidth: Bandwidth,
    model: str | None,
    parameters: list[nn.Parameter] | None,
) -> Iterator[Row]:
    """Rows as they come: the model first, then each workload and dtype."""
    if model is not None and parameters is not None:
        own = bandwidth if bandwidth.device == parameters[0].device else Bandwidth(parameters[0].device)
        yield from _rows(model, _dtype_of(parameters), own, parameters)
    for name in names:
        for dtype in dtypes or WORKLOADS[name].dtypes:
            yield from _rows(name, dtype, bandwidth, None)


def _rows(name: str, dtype: str, bandwidth: Bandwidth, parameters: list[nn.Parameter] | None) -> list[Row]:
    """The unclipped and the clipped row of one list of gradients."""
    rows = [Row(name, dtype, clipped) for clipped in (False, True)]
    if parameters is None:
        nbytes = WORKLOADS[name].nbytes(dtype)
    else:
        nbytes = sum(p.nbytes for p in parameters)
    if note := no_memory(nbytes, bandwidth.device):
        for row in rows:
            row.note = note
        return rows
    if parameters is None:
        gradients = Gradients.of(WORKLOADS[name], dtype, bandwidth.device)
    else:
        gradients = Gradients(parameters)
    measure(rows, gradients, bandwidth)
    return rows


def _device(named: str | None) -> torch.device:
    """Raises ValueError for one that is not here."""
    if named is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(named)
        torch.empty(1, device=device).fill_(1).item()
        return device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {named}: {str(error).splitlines()[0]}") from error


def _parameters(model: str) -> list[nn.Parameter]:
    """Of the user's model: those that get gradients. Raises ReplayError for a model without."""
    with importable(os.getcwd()):
        subject = build_subject(function_named(model))
    found = [p for p in subject.model.parameters() if p.requires_grad and p.numel()]
    if not found:
        raise ReplayError(f"{model}: its model has no parameter that requires a gradient")
    return found


def _dtype_of(parameters: list[nn.Parameter]) -> str:
    """Their dtype, or "mixed"."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters}
    return dtypes.pop() if len(dtypes) == 1 else "mixed"
