"""The checkpoint of an acceptance head."""

from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.common.own import Own


class AcceptanceLayout(Own):
    """SpecDec++'s acceptance head."""

    name = "acceptance"
    summary = "SpecDec++'s acceptance head (foretell alone)"
    head = AcceptanceHead
    config = AcceptanceHeadConfig
    architectures = ("ForetellAcceptance",)
