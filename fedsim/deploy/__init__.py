# SPDX-License-Identifier: Apache-2.0
"""A federation on real machines: its folder, its certificates and keys, its proxy, and what is wrong with it."""
