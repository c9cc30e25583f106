# SPDX-License-Identifier: BSD-3-Clause
"""`make gpu-check`: build, tests and measurements on a machine with a GPU."""
