# SPDX-License-Identifier: Apache-2.0
"""The estimators behind `fedsim.audit.estimators`: from counts or scores to a lower bound on epsilon."""
