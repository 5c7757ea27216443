"""Train any contrastive loss on several GPUs and get exactly the loss and the gradients that one big GPU would give.

loss_fn = contrastive_zoo.DistributedLoss(contrastive_zoo.NTXent(temperature=0.1))
loss = loss_fn(view1, view2)      # this rank's rows; value and gradients are those of all ranks' rows
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from contrastive_zoo.public import *
else:

    def __getattr__(name):
        """Import the public names when one is asked for: pytest loads the plugin without torch, in a third of the time."""
        public = vars(importlib.import_module(f"{__name__}.public"))
        if name == "__all__":
            return [*(x for x in public if x[0].isalpha()), "__version__"]
        if name in public:
            return globals().setdefault(name, public[name])
        from contrastive_zoo.ranks.suggestions import missing

        rooms = (f"{room}.{x}" for room in ("data", "metrics") for x in getattr(public.get(room), "__all__", ()))
        return missing(__name__, [*rooms, *__dir__()])(name)

    def __dir__():
        return sorted(__getattr__("__all__"))
