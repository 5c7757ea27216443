"""Losses of other libraries under DistributedLoss, compared with the same loss on one process."""
