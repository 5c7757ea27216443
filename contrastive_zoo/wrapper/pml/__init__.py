"""Losses of pytorch-metric-learning in DistributedLoss: evaluated on shards, or replaced by this library's."""
