"""Sharded evaluation of pytorch-metric-learning's losses: each rank evaluates its local anchors, 1/W of the work.

A loss of that library computes one value per pair, triplet or anchor, and a reducer computes one number from them. Here
each rank computes the values of its own anchors, with the library's own code; sums and counts are then added over ranks.
Three things need care:

- An anchor is no positive of itself. The library excludes it only if anchors and candidates are one tensor. So pairs are
  chosen here, and miners are called such that the anchor is left out.
- The library returns early if a batch has no positives, or no negatives. A rank may have none although the batch has
  some. Such a rank evaluates a padding sample and drops its values, so that it takes the same branch as the whole batch.
- Some anchors need more than the candidates: a mean over all pairs, another anchor's negatives. A message brings it.
"""
