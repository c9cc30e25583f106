# SPDX-License-Identifier: BSD-3-Clause
"""pytest cases: the optimizer phase, sharded gradients, the monitor and the collectives formula."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastclip.bench.machine import available_memory
from fastclip.bench.timing import MIN_ROUNDS
from fastclip.bench.workloads import SMOKE

from . import collectives, monitoring, phases, sharded


@pytest.mark.parametrize("name", ["torch", "fastclip"])
@pytest.mark.parametrize("setting", phases.settings(), ids=lambda s: "-".join(map(str, s.case)))
def test_phase(benchmark: BenchmarkFixture, setting: phases.PhaseSetting, name: str) -> None:
    if phases.COPIES * setting.nbytes > available_memory():
        pytest.skip("not enough memory")
    phase = phases.checked_phase(setting)
    call = phase.torch_call if name == "torch" else phase.fastclip_call
    benchmark.pedantic(call, setup=phase.prepare, rounds=MIN_ROUNDS, iterations=1)


def test_clip_grad_norm_of_sharded_gradients() -> None:
    for count, theirs, ours in sharded.measure(2):
        assert theirs > 0 and ours > 0
        assert SMOKE or theirs / ours >= sharded.BAR, f"{count} parameters: {theirs / ours:.1f}x"


def test_monitor_overhead() -> None:
    for row in monitoring.measure():
        assert row.seconds > 0
        bar = monitoring.BARS.get(row.name)
        assert SMOKE or bar is None or row.overhead < bar, f"{row.name}: {row.overhead:+.1%}"


def test_collectives_prints_its_table(capsys: pytest.CaptureFixture) -> None:
    collectives.main()
    lines = capsys.readouterr().out.splitlines()
    assert "2000 | 8 | FSDP2 | 1 | 64.0" in lines
