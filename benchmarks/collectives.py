# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.collectives`: what a clip of sharded gradients says to other processes, as a formula.

Each process group over which gradients are sharded (one for each mesh dimension in use) gets one all_reduce,
each further process group one more; for the largest element (inf) they are two. Nothing depends on how many
elements the gradients have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FLOAT64 = 8
_HEADER = 3  # that the lists are the same


@dataclass(frozen=True)
class Cost:
    """Sizes in float64 numbers of the all_reduces of one call, in their order."""

    sizes: tuple[int, ...]

    @property
    def collectives(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        return _FLOAT64 * sum(self.sizes)


def _padded(count: int) -> int:
    power = 1
    while power < count:
        power *= 2
    return power


def cost(rows: Sequence[int], world: int, is_extreme: bool = False, process_groups: int = 0) -> Cost:
    """The all_reduces of a call that is not the first of its groups.

    Args:
        rows: for each group of a mesh dimension, how many parameters are sharded on it.
        world: processes in all; each tells how many NaN and Inf it saw.
        is_extreme: for norm_type inf.
        process_groups: further groups, as given to `process_group`.
    """
    sizes: list[int] = []
    # A further group sums 3 numbers for each set of further groups that a parameter can belong to.
    for count in (*rows, *[2 ** (process_groups - 1)] * process_groups):
        if is_extreme:
            sizes.append(_padded(count))
        sizes.append(_padded(_HEADER + world + count * (2 if is_extreme else 3)))
    return Cost(tuple(sizes))


def main() -> None:
    print("parameters | processes | layout | all_reduces | KiB each process sends")
    for parameters in (148, 400, 2000, 10_000):
        for world in (2, 8, 64, 1024):
            for layout, rows in (("FSDP2", [parameters]), ("FSDP2 x TP", [parameters, parameters // 2])):
                found = cost(rows, world)
                print(f"{parameters} | {world} | {layout} | {found.collectives} | {found.bytes / 1024:.1f}")


if __name__ == "__main__":
    main()
