"""``draft.config``, by the name that it had before methods' configurations moved beside their drafters."""

from foretoken.draft.config import Loader, MethodConfig

__all__ = ["Loader", "MethodConfig"]
