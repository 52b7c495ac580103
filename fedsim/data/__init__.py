# SPDX-License-Identifier: Apache-2.0
"""Data: sources, the encoding of tables and text, and how rows are divided among clients."""

from fedsim.data.dataset import Dataset
from fedsim.data.partition import Partition, label_counts, make_partition
from fedsim.data.sources import load_dataset

__all__ = ["Dataset", "Partition", "label_counts", "load_dataset", "make_partition"]
