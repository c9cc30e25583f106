# SPDX-License-Identifier: BSD-3-Clause
"""`python -m fastclip`: the diagnosis."""

from .cli.doctor import report

if __name__ == "__main__":
    print(report())
