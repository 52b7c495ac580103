# SPDX-License-Identifier: Apache-2.0
"""The test of the auditor itself: how often its lower bounds are above an epsilon that is known."""
