# SPDX-License-Identifier: Apache-2.0
"""The federation: one Flower ServerApp, one ClientApp, the grid between them, and what is written down."""

import os

# Flower reports its use and asks for newer versions, from its first import on, unless the environment says no.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
