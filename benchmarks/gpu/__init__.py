# SPDX-License-Identifier: BSD-3-Clause
"""What `make gpu-check` does on a machine with a GPU."""
