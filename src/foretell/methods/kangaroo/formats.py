"""The checkpoint of Kangaroo's adapter."""

from foretell.heads.own_layout import Own
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig


class KangarooLayout(Own):
    """The adapter; its tensors are named as in the authors' AdapterModel."""

    name = "kangaroo"
    summary = "Kangaroo's adapter (foretell alone)"
    head = KangarooHead
    config = KangarooHeadConfig
    architectures = ("ForetellKangaroo",)
