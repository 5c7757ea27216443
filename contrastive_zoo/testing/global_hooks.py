"""Remove hooks of all modules without a trace."""

from typing import Any

from torch.nn.modules import module


def remove_hook(handle: Any) -> None:
    """Remove a hook that ``register_module_forward_hook`` or another function of torch has registered.

    torch (2.13) keeps a note of a removed hook's keyword arguments, which ``torch.compile`` takes for a hook and warns of.

    Examples:
        >>> handle = module.register_module_forward_hook(print, with_kwargs=True, always_call=True)
        >>> remove_hook(handle)
        >>> module._has_any_global_hook()
        OrderedDict()
    """
    handle.remove()
    module._global_forward_hooks_with_kwargs.pop(handle.id, None)
    module._global_forward_hooks_always_called.pop(handle.id, None)
