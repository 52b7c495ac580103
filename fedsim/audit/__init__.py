# SPDX-License-Identifier: Apache-2.0
"""The auditor: what an adversary achieved, what a claim allows, and whether the two agree."""
