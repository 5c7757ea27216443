"""The comparison of every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process."""
