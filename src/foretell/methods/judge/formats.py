"""The checkpoint of the judge's head."""

from foretell.methods.common.own import Own
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights


class JudgeLayout(Own):
    """The judge's linear head."""

    name = "judge"
    summary = "the judge's head (foretell alone)"
    head = JudgeWeights
    config = JudgeHeadConfig
    architectures = ("ForetellJudge",)
