# SPDX-License-Identifier: BSD-3-Clause
"""What only a GPU can show: streams, graphs, synchronisations, launches, memory, sizes, the public API."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fastclip
from fastclip.backends import native, triton
from helpers import cases
from helpers.cases import DTYPES, INF, dtype_name

pytestmark = pytest.mark.gpu

GPU = "cuda"
SYNCHRONISING = ("Synchronize", "StreamWait", "MemcpyDtoH", "Memcpy DtoH")


@pytest.fixture(autouse=True)
def native_backend():
    reason = native.unavailable(torch.device(GPU))
    assert reason is None, reason
    with fastclip.backends.use("native"):
        yield


def parameters(count: int, size: int = 1000, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=GPU)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def clones(original: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(p.detach().clone()) for p in original]
    for new, old in zip(made, original, strict=True):
        new.grad = old.grad.clone()
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_drop_in_functions_match_torch_on_a_gpu(dtype, norm_type, max_norm):
    mine = parameters(50, 5000, dtype)
    theirs = clones(mine)
    total_norm = fastclip.clip_grad_norm_(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert total_norm.device.type == GPU
    rtol = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}.get(dtype, 1e-12)
    torch.testing.assert_close(total_norm.to(expected.dtype), expected, rtol=rtol, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=1e-6)


def test_clip_bumps_version_counters_on_a_gpu():
    (parameter,) = parameters(1)
    before = parameter.grad._version
    fastclip.clip_grad_norm_([parameter], 1.0)
    assert parameter.grad._version == before + 1


def profiled(call) -> list[str]:
    """Names of everything the GPU and the CUDA runtime did in the second of two calls."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
    names = [event.name for event in trace.events()]
    assert any("statistics_kernel" in name for name in names), "the profiler saw no kernel"
    return names


@pytest.mark.parametrize("count", [1, 200, 1600, 2000])
def test_clip_does_not_synchronize_and_launches_few_kernels(count):
    grads = [p.grad for p in parameters(count, 64)]
    names = profiled(lambda: native.clip_(grads, 1.0, 2.0, "propagate"))
    # The trace itself ends with one synchronisation of the device.
    waits = [name for name in names if any(word in name for word in SYNCHRONISING)]
    assert [name for name in waits if name != "cudaDeviceSynchronize"] == []
    assert waits.count("cudaDeviceSynchronize") <= 1
    launches = [name for name in names if "_kernel" in name and "fastclip" in name]
    assert len(launches) == (2 if count <= 1600 else 4), launches


def test_public_functions_do_not_synchronize():
    mine = parameters(100)
    named = [(f"p{i}", p) for i, p in enumerate(mine)]
    calls = [
        lambda: fastclip.clip_grad_norm_(mine, 1.0),
        lambda: fastclip.clip_grad_norm_(mine, torch.tensor(1.0)),
        lambda: fastclip.clip_grad_norm_(mine, torch.ones((), device=GPU), nonfinite="skip"),
        lambda: fastclip.clip_grad_value_(mine, 0.5),
        lambda: fastclip.get_total_norm([p.grad for p in mine]),
        lambda: fastclip.clip_grads_with_norm_(mine, 1.0, torch.ones((), device=GPU)),
        lambda: fastclip.clip_(named, 1.0, groups="tensor", nonfinite="zero"),
        lambda: fastclip.grad_stats(named).per_tensor,
        lambda: fastclip.clip_(named, {True: 1.0, False: 2.0}, groups=lambda name: name < "p5"),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", [native, triton], ids=["native", "triton"])
def test_clip_is_captured_in_a_graph_and_replayed(backend):
    """Gradients change between replays, their addresses do not."""
    grads = [torch.randn(5000, device=GPU) for _ in range(20)]
    max_norm = torch.ones(1, device=GPU)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        backend.clip_(grads, max_norm, 2.0, "skip")
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        summary, stats = backend.clip_(grads, max_norm, 2.0, "skip")
    for scale, limit in ((1.0, 1.0), (10.0, 3.0), (0.001, 1e9), (1.0, 0.5)):
        fresh = [torch.randn(5000, device=GPU) * scale for _ in grads]
        for grad, new in zip(grads, fresh, strict=True):
            grad.copy_(new)
        max_norm.fill_(limit)
        graph.replay()
        expected = [g.clone() for g in fresh]
        wanted, wanted_stats = backend.clip_(expected, max_norm, 2.0, "skip")
        assert torch.equal(summary, wanted) and torch.equal(stats, wanted_stats)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_first_call_may_be_captured_in_a_graph():
    """In a process of its own, as this one has loaded the kernels."""
    import subprocess
    import sys

    code = (
        "import torch, fastclip\n"
        "from fastclip.backends import native\n"
        "grads = [torch.ones(1000, device='cuda') for _ in range(4)]\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    summary, _ = native.clip_(grads, 1.0, 2.0, 'propagate')\n"
        "graph.replay()\n"
        "print(round(summary[0, 0].item() ** 2))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "4000", result.stderr[-3000:]


def test_capture_refuses_several_limits_from_the_cpu():
    grads = [torch.ones(10, device=GPU) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        with torch.cuda.graph(graph):
            native.clip_(grads, torch.ones(2), 2.0, "propagate", [0, 1])


def test_clip_uses_the_current_stream():
    grads = [torch.full((1 << 20,), 1.0, device=GPU) for _ in range(8)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for grad in grads:
            grad.fill_(2.0)  # comes late; a call on another stream would read 1
        summary, _ = native.clip_(grads, 1.0, 2.0, "propagate")
    side.synchronize()
    assert abs(summary[0, 0].item() / (2.0 * (8 << 20) ** 0.5) - 1) < 1e-6


def test_clip_works_on_many_streams_at_once():
    """Each call has a workspace of its own."""
    streams = [torch.cuda.Stream() for _ in range(6)]
    lists = [[torch.full((70_000,), float(i + 1), device=GPU) for _ in range(30)] for i in range(6)]
    torch.cuda.synchronize()
    norms = []
    for _ in range(20):
        for stream, grads in zip(streams, lists, strict=True):
            with torch.cuda.stream(stream):
                norms.append(native.grad_stats(grads, 2.0)[0])
    torch.cuda.synchronize()
    for k, norm in enumerate(norms):
        assert abs(norm.item() / ((k % 6 + 1) * (30 * 70_000) ** 0.5) - 1) < 1e-6


def test_clip_allocates_only_a_small_workspace():
    grads = [torch.randn(10_000_000, device=GPU, dtype=torch.bfloat16) for _ in range(10)]
    native.clip_(grads, 1.0, 2.0, "propagate")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    native.clip_(grads, 1.0, 2.0, "propagate")
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_clip_of_more_than_2_to_the_31_elements(dtype):
    size = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < size * dtype.itemsize * 1.2:
        pytest.skip("not enough memory on the GPU")
    grad = torch.zeros(size, dtype=dtype, device=GPU)
    grad[-1], grad[-12_345], grad[5] = 3.0, 4.0, 12.0
    grad[1 << 31] = float("nan")
    summary, stats = native.clip_([grad], 6.5, 2.0, "zero")
    assert stats[0].tolist() == [169.0, 1.0, 0.0]
    assert abs(summary[0, 0].item() - 13.0) < 1e-5
    assert [grad[-1].item(), grad[5].item(), grad[1 << 31].item()] == [1.5, 6.0, 0.0]


def test_clip_of_a_list_over_several_devices():
    """Parts on the CPU and on every GPU; the coefficient is that of the whole."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    mine = [torch.nn.Parameter(torch.zeros(1000, device=d)) for d in devices for _ in range(3)]
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    total_norm = fastclip.clip_grad_norm_(mine, 1.0)
    assert abs(total_norm.item() / (len(mine) * 1000) ** 0.5 - 1) < 1e-6
    assert all(abs(p.grad[0].item() * total_norm.item() - 1) < 1e-5 for p in mine)


def test_clip_serves_the_second_gpu_while_the_first_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    grads = [torch.ones(1000, device="cuda:1") for _ in range(4)]
    assert torch.cuda.current_device() == 0
    total_norm, _ = native.grad_stats(grads, 2.0)
    assert total_norm.device.index == 1 and abs(total_norm.item() ** 2 - 4000) < 1e-2
    assert torch.cuda.current_device() == 0


def test_clip_serves_unusual_gradients_in_parts():
    """Gaps are packed; a complex one and a sparse one go to the reference; the others stay native."""
    dense = cases.clone([cases.normal(torch.float32, 50, 20)], GPU)[0]
    gappy = cases.clone([cases.normal(torch.float32, 50, 20)[:, ::2]], GPU)[0]
    sparse = torch.eye(5, device=GPU).to_sparse()
    grads = [dense, gappy, torch.ones(3, dtype=torch.complex64, device=GPU), sparse]
    before = copy.deepcopy(dense)
    squares = sum(g.to_dense().abs().square().sum().item() for g in grads)
    mine = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=GPU))
        parameter.grad = grad
        mine.append(parameter)
    total_norm = fastclip.clip_grad_norm_(mine, 1.0)
    assert abs(total_norm.item() / squares**0.5 - 1) < 1e-6
    torch.testing.assert_close(dense, before / (total_norm + 1e-6))


def test_captured_training_step_stays_finite():
    """A small model whose whole step, clipping included, is one graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(128, 32, device=GPU)
    targets = inputs[:, :1].sin()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        fastclip.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = step().item()
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(200):
        graph.replay()
    assert loss.item() < 0.5 * first
