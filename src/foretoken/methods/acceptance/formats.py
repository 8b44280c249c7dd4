"""The checkpoint of an acceptance head."""

from foretoken.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretoken.methods.common.own import Own


class AcceptanceLayout(Own):
    """SpecDec++'s acceptance head."""

    name = "acceptance"
    summary = "SpecDec++'s acceptance head (foretoken alone)"
    head = AcceptanceHead
    config = AcceptanceHeadConfig
    architectures = ("ForetokenAcceptance",)
