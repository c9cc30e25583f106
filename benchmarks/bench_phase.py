# SPDX-License-Identifier: BSD-3-Clause
"""The whole phase of the optimizer, sharded gradients and the monitor, as cases of their own."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastclip.bench import parity
from fastclip.bench.machine import available_memory
from fastclip.bench.timing import MIN_PAIRS
from fastclip.bench.workloads import SMOKE, WORKLOADS, Gradients

from . import collectives, monitoring, phases, sharded


@pytest.mark.parametrize("name", ["torch", "fastclip"])
@pytest.mark.parametrize("setting", phases.settings(), ids=lambda s: "-".join(map(str, s.case)))
def test_phase(benchmark: BenchmarkFixture, setting: phases.Setting, name: str) -> None:
    workload = WORKLOADS[setting.workload]
    if 8 * workload.nbytes(setting.dtype) > available_memory():
        pytest.skip("not enough memory")
    gradients = Gradients.of(workload, setting.dtype)
    exact = parity.exact_norm(gradients.saved)
    phase = phases.Phase(setting, gradients.parameters, gradients.saved, exact)
    phase.check()
    call = phase.torch_call if name == "torch" else phase.fastclip_call
    benchmark.pedantic(call, setup=phase.prepare, rounds=MIN_PAIRS, iterations=1)


def test_sharded() -> None:
    for count, theirs, ours in sharded.measure(2):
        assert theirs > 0 and ours > 0
        assert SMOKE or theirs / ours >= sharded.BAR, f"{count} parameters: {theirs / ours:.1f}x"


def test_monitored() -> None:
    for row in monitoring.measure():
        assert row.seconds > 0
        bar = monitoring.BARS.get(row.name)
        assert SMOKE or bar is None or row.overhead < bar, f"{row.name}: {row.overhead:+.1%}"


def test_the_formula_prints(capsys: pytest.CaptureFixture) -> None:
    collectives.main()
    lines = capsys.readouterr().out.splitlines()
    assert "2000 | 8 | FSDP2 | 1 | 64.0" in lines
