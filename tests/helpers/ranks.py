# SPDX-License-Identifier: BSD-3-Clause
"""Processes that talk by gloo or NCCL, kept for many tests: starting them costs more than most tests do.

A test hands a function of one of these modules to all of them. What one raises is reported; a rank that does
not answer in time is killed with all others, and the test fails.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

TIMEOUT = 60.0  # seconds for a test, hard
COLLECTIVE_TIMEOUT = 15.0  # after which a collective gives up waiting for a rank


def _serve(rank: int, world: int, backend: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        module, name, arguments = job
        torch.manual_seed(0)
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send(("result", function(*arguments)))
        except BaseException:  # whatever it is, the test has to see it
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankFailed(AssertionError):
    """A rank raised, or did not answer."""


class Ranks:
    """`world` processes, ranks 0 to world - 1."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world = world
        self._backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(), "store")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            arguments = (rank, self.world, self._backend, store, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)
        self._collect(TIMEOUT)

    def stop(self) -> None:
        """Kill them; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _collect(self, timeout: float) -> list[tuple[str, Any]]:
        end = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.stop()
                raise RankFailed(f"rank {rank} gave no answer in {timeout:.0f} seconds: it hangs")
            answers.append(pipe.recv())
        return answers

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        """("result", value) or ("error", traceback) of each rank. New processes afterwards if one raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers = self._collect(TIMEOUT)
        if any(kind == "error" for kind, _ in answers):
            self.stop()  # collectives of theirs may be under way
        return answers

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            RankFailed: with the traceback of the first rank that raised.
        """
        answers = self.outcomes(function, *arguments)
        for rank, (kind, value) in enumerate(answers):
            if kind == "error":
                raise RankFailed(f"rank {rank} raised:\n{value}")
        return [value for _, value in answers]
