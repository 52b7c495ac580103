# SPDX-License-Identifier: Apache-2.0
"""The bounds behind `fedsim.audit.bounds`: what a claim allows an adversary to achieve, and the inverses."""
