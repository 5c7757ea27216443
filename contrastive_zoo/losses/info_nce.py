"""Softmax over two towers: InfoNCE, CLIP, and CLOOB's, which leaves the positive out of its sum."""

from collections.abc import Iterable, Mapping

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Pairs
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.softmax_arithmetic import smooths
from contrastive_zoo.loss_base.families import ImageTextLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction, Smoothing, Temperature, field
from contrastive_zoo.loss_base.temperature import LearnableTemperature, LogitScale


class InfoNCE(Loss, engine="softmax", has_kernel=True):
    r"""Compute the cross-entropy of key i for query i; row i of queries belongs to row i of keys.

    With q, k the unit embeddings of all ranks and X(i) the extra negatives that query i sees,

        loss = mean_i [ log ( Σ_j exp(q_i·k_j / t) + Σ_{x∈X(i)} exp(q_i·x / t) )  −  q_i·k_i / t ]

    Without extra negatives this is ``cross_entropy(q @ k.T / t, arange(N), label_smoothing=…)``. MoCo v3 detaches keys and
    multiplies the loss by 2t: ``WeightedSum([InfoNCE(temperature=t)], weights=[2 * t])``.

    Called as ``loss(queries, keys, negatives)``:

    - queries, keys: [n, d].
    - negatives: [m, d] are candidates of every query of every rank (m may differ between ranks); [n, m, d] are candidates
      of one query each. In the symmetric direction only queries are candidates.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        symmetric: whether to average with the direction from keys to queries, ``cross_entropy(k @ q.T / t, arange(N))``.
        in_batch_negatives: whether other queries' keys are negatives. If not, the first sum is its term j = i, as in MoCo's
            loss over the own key and the queue: pass ``negatives``, and not symmetric.
        label_smoothing: ε, 0 … 1; with ε > 0 the last term is (1 − ε) q_i·k_i / t + ε · the mean logit of i's candidates.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye = torch.eye(2)
        >>> InfoNCE(temperature=1.0)(eye, eye)   # log(e + 1) − 1
        tensor(0.3133)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748; symmetric: Radford et al. 2021, fig. 3,
    https://arxiv.org/abs/2103.00020; without negatives in the batch: He et al. 2020, eq. 1,
    https://arxiv.org/abs/1911.05722
    """

    temperature: Temperature = 0.07
    symmetric: bool = False
    in_batch_negatives: bool = True
    label_smoothing: Smoothing = 0.0
    normalize: bool = True
    reduction: Reduction = "mean"

    def settings_problem(self) -> str | None:
        alone = self.symmetric is True and self.in_batch_negatives is False
        return super().settings_problem() or (_OWN_KEY_ONLY if alone else None)

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | Float[Tensor, "n m d"] | None = None,
    ) -> Inputs:
        problem = _OWN_KEY_ONLY if negatives is None and not self.in_batch_negatives else None
        return Inputs.of({"queries": queries, "keys": keys, "negatives": negatives}, problem)

    def needs(self, inputs: Inputs) -> Needs:
        queries, *candidates = inputs.rows
        negatives = inputs.rows.get("negatives")
        no_kernel = None
        if not self.in_batch_negatives:
            no_kernel = "computes InfoNCE with in_batch_negatives=True only"
        elif negatives is not None and (self.symmetric or negatives.ndim != 2):
            no_kernel = "computes InfoNCE with negatives of all queries, [m, d], if it is not symmetric"
        return super().needs(inputs)._replace(anchors=(queries,), candidates=(*candidates,), no_kernel=no_kernel)

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return len(rows) == 2 and self.normalize and self.is_reduced and not smooths(self.label_smoothing)

    def entries(self, stated: CallInputs) -> list[Entry]:
        (scale, entries), (queries, keys, *negatives) = self.scale_of(stated), stated.inputs.rows
        columnwise = {keys: self.symmetric} if self.in_batch_negatives else {}
        columnwise |= {name: False for name in negatives if stated.inputs.rows[name].ndim == 2}
        pairs = (Pairs([queries], [name], scale, self.normalize, both) for name, both in columnwise.items())
        sums = _sums(self.label_smoothing, [*columnwise, *([queries] if self.symmetric else [])], stated)
        return [*entries, *pairs, *sums, *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        return pairs.cross_entropy(
            self.reduction, symmetric=self.symmetric, in_batch_negatives=self.in_batch_negatives,
            label_smoothing=batch.settings.label_smoothing,
        )  # fmt: skip


def _sums(label_smoothing: object, names: Iterable[str], stated: CallInputs) -> list[Entry]:
    """Return the messages of label smoothing: the sums of these tensors' embeddings."""
    sums = (stated.features(partial=True)._replace(of=name) for name in names)
    return [*sums] if smooths(label_smoothing) else []


_OWN_KEY_ONLY = (
    "with in_batch_negatives=False a query is compared only with its own key and with negatives. Pass them, "
    "loss(queries, keys, negatives), and leave symmetric=False."
)


class Clip(ImageTextLoss, LogitScale, engine="softmax", has_kernel=True):
    r"""Compute the mean cross-entropy of text i for image i and of image i for text i: symmetric :class:`InfoNCE`.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks and S = x yᵀ / t,

        loss = ½ · cross_entropy(S, arange(N), label_smoothing=ε) + ½ · cross_entropy(Sᵀ, arange(N), label_smoothing=ε)

    Equal to open_clip's ``ClipLoss()(images, texts, logit_scale=1 / t)`` on one process.

    Args:
        temperature: t; ``LearnableTemperature(0.07)`` by default. Its parameter is ``loss.logit_scale``, log(1/t) as
            open_clip's ``model.logit_scale``, of which at most log(100) counts.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all candidates.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> Clip(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Radford et al. 2021, fig. 3, https://arxiv.org/abs/2103.00020
    """

    temperature: Temperature = field(factory=LearnableTemperature)
    label_smoothing: Smoothing = 0.0

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return self.normalize and self.is_reduced and not smooths(self.label_smoothing)

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), *_sums(self.label_smoothing, stated.inputs.rows, stated)]

    def compute(self, batch: Batch) -> Tensor:
        pairs, settings = TowerPairs(batch, batch.settings.temperature, self.normalize), batch.settings
        return pairs.cross_entropy(self.reduction, symmetric=True, label_smoothing=settings.label_smoothing)


class InfoLOOB(ImageTextLoss, engine="softmax", has_kernel=True):
    r"""Compute the leave-one-out bound: :class:`Clip` whose softmax leaves the positive out of its sum.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks and S = x yᵀ / t,

        loss = mean_i [ ½ log Σ_{j≠i} exp(S_ij)  +  ½ log Σ_{j≠i} exp(S_ji)  −  S_ii ]

    It keeps its gradient where a positive already has the largest similarity, and is 0 for a single pair. CLOOB adds up
    both directions, multiplies by t, and takes embeddings that a Hopfield network has retrieved. :class:`DCL` is the same
    for two views.

    Args:
        temperature: t > 0; 1/30 is CLOOB's. A tensor or module is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> InfoLOOB(temperature=1.0)(torch.eye(2), torch.eye(2))   # 0 − 1
        tensor(-1.)

    Source: Fürst et al. 2022, eq. 5, https://arxiv.org/abs/2110.11316
    """

    temperature: Temperature = 1 / 30

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        over_texts, over_images, positive = pairs.sums(symmetric=True)
        assert over_images is not None
        losses = ((over_texts + over_images) / 2 - positive).to(pairs.rows[0].dtype)
        return batch.reduce(losses, losses.new_full(losses.shape, batch.total > 1), reduction=self.reduction)
