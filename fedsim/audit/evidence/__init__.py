# SPDX-License-Identifier: Apache-2.0
"""What the server of a federation sees of canaries, and the tests of a claim on it."""
