# SPDX-License-Identifier: BSD-3-Clause
"""What no single backend call serves: gradients on several devices; dense, complex and sparse ones mixed."""
