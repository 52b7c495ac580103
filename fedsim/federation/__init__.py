# SPDX-License-Identifier: Apache-2.0
"""The federation: one Flower ServerApp, one ClientApp, the grid between them, and what is written down."""
