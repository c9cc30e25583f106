# SPDX-License-Identifier: BSD-3-Clause
"""`fastclip demo`: a small language model trained with torch's clipping and with fastclip's."""
