"""open_clip's losses of pairs, called as it calls its own, on the pairs of all ranks. open_clip itself is not imported."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from contrastive_zoo.engine.precision import at_least_float32
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.info_nce import Clip
from contrastive_zoo.losses.sigmoid import SigLIP
from contrastive_zoo.wrapper.distributed import DistributedLoss

_OF_OPEN_CLIP = ("local_loss", "gather_with_grad", "cache_labels", "rank", "world_size", "use_horovod", "dist_impl")


class ClipLoss(nn.Module):
    """Compute :class:`contrastive_zoo.Clip` by the call of open_clip's ``ClipLoss``.

    Called as ``loss(**model(images, texts), output_dict=True)``, with open_clip's names: ``image_features`` and
    ``text_features``, [n, d], normalised; ``logit_scale``, 1/t > 0, with one element. n may differ between ranks. The value
    and the gradients, that of the scale included, are those of open_clip's loss on one process with all pairs. The result is
    ``{"contrastive_loss": value}``, or the tensor itself without ``output_dict``. A ``logit_bias`` has the gradient 0.

    Args:
        options: those of :class:`contrastive_zoo.DistributedLoss`, such as ``process_group`` and ``ring``. open_clip's
            ``local_loss``, ``gather_with_grad``, ``rank`` and ``world_size`` have no counterpart.

    Raises:
        TypeError: one of open_clip's options.
        ValueError: as :class:`contrastive_zoo.DistributedLoss`; a scale that is not positive.

    Examples:
        >>> import torch
        >>> model_out = {"image_features": torch.eye(2), "text_features": torch.eye(2), "logit_scale": torch.tensor(1.0)}
        >>> ClipLoss()(**model_out, output_dict=True)   # log(e + 1) − 1
        {'contrastive_loss': tensor(0.3133)}

    Source: the calls of open_clip 3.3, https://github.com/mlfoundations/open_clip
    """

    make: Callable[[], Loss] = staticmethod(partial(Clip, temperature=1.0, normalize=False))

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if theirs := [name for name in _OF_OPEN_CLIP if name in options]:
            name = type(self).__name__
            fix = f"Leave them out, {name}(): every rank computes its own pairs against those of all ranks"
            raise TypeError(f"{name}: {', '.join(theirs)} are open_clip's options. {fix}.")
        self.contrastive = DistributedLoss(self.make(), **options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of all ranks' pairs, from this rank's."""
        # in bfloat16 the inverse would be rounded once more
        settings = {"temperature": 1 / at_least_float32(logit_scale), **self._settings(logit_bias)}
        for name, x in settings.items():
            setattr(self.contrastive, name, x)
        try:
            loss = self.contrastive(image_features, text_features)
        finally:  # they hold the graph of the model
            for name in settings:
                setattr(self.contrastive, name, 1.0)
        if logit_bias is not None and "logit_bias" not in settings:
            loss = loss + 0 * logit_bias.sum()  # DDP waits for a gradient of each parameter of the model
        return {"contrastive_loss": loss} if output_dict else loss

    def _settings(self, bias: Tensor | None) -> dict[str, Tensor]:
        """Return the settings of this step beside the temperature."""
        return {}


class SigLipLoss(ClipLoss):
    """Compute :class:`contrastive_zoo.SigLIP` by the call of open_clip's ``SigLipLoss``.

    Called as :class:`ClipLoss`, with the same options; ``logit_bias``, with one element, is required. ``ring=True`` takes
    the place of ``dist_impl``.

    Raises:
        ValueError: as :class:`ClipLoss`; no bias.

    Examples:
        >>> import torch
        >>> one, zero = torch.tensor(1.0), torch.tensor(0.0)
        >>> SigLipLoss()(torch.eye(2), torch.eye(2), logit_scale=one, logit_bias=zero)   # log(1 + e⁻¹) + log 2
        tensor(1.0064)
    """

    make = staticmethod(partial(SigLIP, temperature=1.0, logit_bias=0.0, normalize=False))

    def _settings(self, bias: Tensor | None) -> dict[str, Tensor]:
        if bias is None:
            raise ValueError("SigLipLoss: logit_bias is missing. Pass the model's bias: logit_bias=model.logit_bias.")
        return {"logit_bias": bias.view_as(bias)}  # as a parameter, the model's bias would become one of the loss


__all__ = ["ClipLoss", "SigLipLoss"]
