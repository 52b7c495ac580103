# SPDX-License-Identifier: Apache-2.0
"""How near a reconstruction comes to the truth, to a stranger's guess, and to what the claim allows."""
