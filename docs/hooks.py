"""What mkdocs does not know by itself."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings say :func:`name` to those who read them with help(); a page shows the name alone."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>(?:contrastive_zoo\.(?:\w+\.)*)?", "<code>", html)
