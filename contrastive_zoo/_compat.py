"""Names that torch.distributed spells differently from version to version, in one place."""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Rows of every rank into one tensor: ``all_gather_into_tensor`` until torch 2.12, ``all_gather_single`` since."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""A sum of which each rank keeps its part: ``reduce_scatter_tensor`` until torch 2.12, ``reduce_scatter_single`` since."""
