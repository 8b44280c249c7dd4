"""The checkpoint of the judge's head."""

from foretell.heads.own_layout import Own
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights


class JudgeLayout(Own):
    """The judge's linear head."""

    name = "judge"
    summary = "the judge's head (foretell alone)"
    head = JudgeWeights
    config = JudgeHeadConfig
    architectures = ("ForetellJudge",)
