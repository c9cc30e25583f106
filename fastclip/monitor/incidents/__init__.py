# SPDX-License-Identifier: BSD-3-Clause
"""Evidence of an incident: stored so that nothing can break it, read back without running what is in it."""
