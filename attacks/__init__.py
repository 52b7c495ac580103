# SPDX-License-Identifier: Apache-2.0
"""What a server can infer from its transcript. Attacks read observations, never the simulator."""
