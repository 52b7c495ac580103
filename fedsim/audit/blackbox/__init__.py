# SPDX-License-Identifier: Apache-2.0
"""How any callable is audited: neighbouring data sets, many runs, and an event that tells their outputs apart."""
