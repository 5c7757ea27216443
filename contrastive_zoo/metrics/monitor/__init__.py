"""Figures to watch a contrastive training by, of the global batch: :class:`contrastive_zoo.Monitor`."""
