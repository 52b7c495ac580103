# SPDX-License-Identifier: Apache-2.0
"""The games of `fedsim.audit.games`, played: the arena where models train, the adversaries, and their trials."""
