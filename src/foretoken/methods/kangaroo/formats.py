"""The checkpoint of Kangaroo's adapter."""

from foretoken.methods.common.own import Own
from foretoken.methods.kangaroo.head import KangarooHead, KangarooHeadConfig


class KangarooLayout(Own):
    """The adapter; its tensors are named as in the authors' AdapterModel."""

    name = "kangaroo"
    summary = "Kangaroo's adapter (foretoken alone)"
    head = KangarooHead
    config = KangarooHeadConfig
    architectures = ("ForetokenKangaroo",)
