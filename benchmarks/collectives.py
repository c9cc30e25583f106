# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.collectives`: the collectives of a clip of sharded gradients, by a formula.

Each process group over which gradients are sharded (one for each mesh dimension in use) costs one all_reduce,
and so does each further process group; for norm_type inf it is two each. The number of elements has no
influence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FLOAT64 = 8
_HEADER = 3  # checks that all processes pass the same list


@dataclass(frozen=True)
class CollectiveCost:
    """The all_reduces of one call, in order, each with its size in float64 numbers."""

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


def cost(
    rows: Sequence[int], world: int, is_extreme: bool = False, process_groups: int = 0
) -> CollectiveCost:
    """Return the all_reduces of a call; the first call of a group makes more.

    Args:
        rows: the number of sharded parameters for each mesh dimension.
        world: the number of processes; each reports how many NaN and Inf it found.
        is_extreme: whether norm_type is inf.
        process_groups: the number of further groups, as given to `process_group`.
    """
    sizes: list[int] = []
    # A further group sums 3 numbers for each set of further groups that a parameter can belong to.
    for count in (*rows, *[2 ** (process_groups - 1)] * process_groups):
        if is_extreme:
            sizes.append(_padded(count))
        sizes.append(_padded(_HEADER + world + count * (2 if is_extreme else 3)))
    return CollectiveCost(tuple(sizes))


def main() -> None:
    print("parameters | processes | layout | all_reduces | KiB each process sends")
    for parameters in (148, 400, 2000, 10_000):
        for world in (2, 8, 64, 1024):
            for layout, rows in (("FSDP2", [parameters]), ("FSDP2 x TP", [parameters, parameters // 2])):
                found = cost(rows, world)
                print(f"{parameters} | {world} | {layout} | {found.collectives} | {found.bytes / 1024:.1f}")


if __name__ == "__main__":
    main()
