# SPDX-License-Identifier: BSD-3-Clause
"""Time fastclip's clip_grad_norm_ against torch's on this machine.

Both take turns in this process on the same gradients, unclipped and clipped. Norms and gradients are checked
against float64 first: a row with a wrong result gets no time. With --model the gradients are those of your
own model: the function is called without arguments and returns (model, optimizer, loss_function) as for
`fastclip replay`; modules of the working directory can be imported. Values are random and nothing is trained.

Exit status: 0, 1 if a result was wrong, 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

import torch
from torch import nn

from ..bench import clip_table, machine
from ..bench.clip_rows import ClipRow, compare_parameters, compare_workload
from ..bench.timing import Bandwidth
from ..bench.workloads import DTYPES, SMOKE, WORKLOADS
from ..replay.build import ReplayError, call_build
from .building import function_named, importable

DEFAULT_WORKLOADS = ("gpt2_124m", "llama_1b", "many_tiny", "mid_150")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=tuple(WORKLOADS),
        metavar="NAME",
        help=f"any of {', '.join(WORKLOADS)} (default: {', '.join(DEFAULT_WORKLOADS)}; none with --model)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="NAME",
        help=f"dtypes of the workloads: any of {', '.join(DTYPES)} (default: all; llama_1b only bfloat16)",
    )
    device = "device of the workloads: cpu, cuda:1, ... (default: a GPU if there is one)"
    parser.add_argument("--device", help=device)
    model = "function that builds your model, such as train:build"
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help=model)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")


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
    names = options.workload or (DEFAULT_WORKLOADS if parameters is None else ())
    described = machine.describe(device)
    print("\n".join(f"{key:18}{value}" for key, value in described.items()))
    print(f"\n{clip_table.header()}")
    rows = []
    bandwidth = Bandwidth(device)
    for row in _compare(names, options.dtype, bandwidth, options.model, parameters):
        print(clip_table.row_line(row), flush=True)
        rows.append(row)
    print(clip_table.NOTES)
    if busy:
        print(f"\n{clip_table.BUSY}")
    if SMOKE:
        print("\nFASTCLIP_BENCH_SMOKE is set: the gradients are tiny and the figures mean nothing.")
    if file is not None:
        found = {"machine": described, "busy": busy, "smoke": SMOKE, "rows": [r.summary() for r in rows]}
        with file:
            json.dump(found, file, indent=1, allow_nan=False)
            file.write("\n")
    return int(any(row.failed for row in rows))


def _compare(
    names: tuple[str, ...],
    dtypes: tuple[str, ...] | None,
    bandwidth: Bandwidth,
    model: str | None,
    parameters: list[nn.Parameter] | None,
) -> Iterator[ClipRow]:
    """Yield rows as they are measured: the model first, then each workload and dtype."""
    if model is not None and parameters is not None:
        device = parameters[0].device
        own = bandwidth if bandwidth.device == device else Bandwidth(device)
        yield from compare_parameters(model, _dtype_of(parameters), parameters, own)
    for name in names:
        for dtype in dtypes or WORKLOADS[name].dtypes:
            yield from compare_workload(WORKLOADS[name], dtype, bandwidth)


def _device(named: str | None) -> torch.device:
    """Return the named device or the default; raise ValueError if it is not available."""
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
    """Return the parameters of the user's model that get gradients; raise ReplayError if there are none."""
    with importable(os.getcwd()):
        subject = call_build(function_named(model))
    found = [p for p in subject.model.parameters() if p.requires_grad and p.numel()]
    if not found:
        raise ReplayError(f"{model}: its model has no parameter that requires a gradient")
    return found


def _dtype_of(parameters: list[nn.Parameter]) -> str:
    """Return the name of their dtype, or "mixed"."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters}
    return dtypes.pop() if len(dtypes) == 1 else "mixed"
