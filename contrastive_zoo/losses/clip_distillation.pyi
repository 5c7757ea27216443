# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def clip_distillation(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    teacher_images: Float[Tensor, "n e"],
    teacher_texts: Float[Tensor, "n e"],
    *,
    temperature: float | Tensor = 0.07,
    teacher_temperature: float = 0.07,
    weight: float = 0.5,
    symmetric: bool = True,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute CLIP's loss with targets that mix the identity with a teacher's softmax over all ranks' rows.

    With S = x yᵀ / t of the student's unit rows, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss returns two numbers: this loss for λ = 0 and for λ = 1. It trains on their sum, twice this
    loss for λ = ½. The teacher gets no gradient, and neither N × N matrix is held.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        teacher_images: [n, e], of the same samples.
        teacher_texts: [n, e].
        temperature: t > 0, dimensionless; a tensor is learnable.
        teacher_temperature: t' > 0, the teacher's temperature.
        weight: λ from 0 (no teacher) to 1 (teacher only).
        symmetric: whether to average both directions; otherwise only from images to texts.
        normalize: normalise embeddings of student and teacher to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows of different number, a weight out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, uniform = torch.eye(2), torch.ones(2, 2)
        >>> clip_distillation(eye, eye, uniform, uniform, temperature=1.0, weight=1.0)   # log(e + 1) − ½
        tensor(0.8133)

    Source: Hinton et al. 2015, eq. 1, https://arxiv.org/abs/1503.02531, on CLIP's logits
    """

class ClipDistillation(Loss):
    """Compute CLIP's loss with targets that mix the identity with a teacher's softmax over all ranks' rows.

    With S = x yᵀ / t of the student's unit rows, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss returns two numbers: this loss for λ = 0 and for λ = 1. It trains on their sum, twice this
    loss for λ = ½. The teacher gets no gradient, and neither N × N matrix is held.

    Called as ``loss(images, texts, teacher_images, teacher_texts)``:

    - images: [n, d], n may differ between ranks.
    - texts: [n, d], row i belongs to row i of images.
    - teacher_images: [n, e], of the same samples.
    - teacher_texts: [n, e].

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        teacher_temperature: t' > 0, the teacher's temperature.
        weight: λ from 0 (no teacher) to 1 (teacher only).
        symmetric: whether to average both directions; otherwise only from images to texts.
        normalize: normalise embeddings of student and teacher to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows of different number, a weight out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, uniform = torch.eye(2), torch.ones(2, 2)
        >>> ClipDistillation(temperature=1.0, weight=1.0)(eye, eye, uniform, uniform)   # log(e + 1) − ½
        tensor(0.8133)

    Source: Hinton et al. 2015, eq. 1, https://arxiv.org/abs/1503.02531, on CLIP's logits
    """

    temperature: float | Tensor | nn.Module
    teacher_temperature: float
    weight: float
    symmetric: bool
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.07,
        teacher_temperature: float = 0.07,
        weight: float = 0.5,
        symmetric: bool = True,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        images: Float[Tensor, "n d"],
        texts: Float[Tensor, "n d"],
        teacher_images: Float[Tensor, "n e"],
        teacher_texts: Float[Tensor, "n e"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
