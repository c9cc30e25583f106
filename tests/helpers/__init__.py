# SPDX-License-Identifier: BSD-3-Clause
"""What several test files share; tests import from here, never from another test file."""
