"""The checkpoint of an acceptance head."""

from foretell.heads.own_layout import Own
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig


class AcceptanceLayout(Own):
    """SpecDec++'s acceptance head."""

    name = "acceptance"
    summary = "SpecDec++'s acceptance head (foretell alone)"
    head = AcceptanceHead
    config = AcceptanceHeadConfig
    architectures = ("ForetellAcceptance",)
