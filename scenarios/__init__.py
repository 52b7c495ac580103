# SPDX-License-Identifier: Apache-2.0
"""Runnable scenarios: YAML files, each opening with the question that it answers."""
