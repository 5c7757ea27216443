"""Large batches in small memory: the encoder holds the activations of one chunk and recomputes them for the gradient.

A contrastive loss needs all embeddings at once, but the encoder does not: given ∂L/∂z, the gradient of its parameters is
a sum over samples. So the encoder runs twice, one chunk at a time:

    first pass      z_c = f(x_c)  for every chunk c, without a graph
    the loss        L(z; φ), and its backward pass as far as  g = ∂L/∂z
    second pass     z_c = f(x_c)  again, with a graph;  ∂L/∂θ += ⟨g_c, ∂z_c/∂θ⟩

Both passes are one node of the autograd graph: the first is its forward, the second its backward. Everything else
(factors on the loss, a GradScaler, parameters of the loss) is ordinary autograd.

Source: Gao et al. 2021, §3, https://arxiv.org/abs/2101.06983
"""

from contrastive_zoo.gradcache.step import GradCache, cached_step

__all__ = ["GradCache", "cached_step"]
