"""Write conformance vectors: inputs, splits, values and gradients that any implementation of a loss must reproduce."""

from tools.vectors.write import Summary, write_vectors

__all__ = ["Summary", "write_vectors"]
