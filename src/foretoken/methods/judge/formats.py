"""The checkpoint of the judge's head."""

from foretoken.methods.common.own import Own
from foretoken.methods.judge.head import JudgeHeadConfig, JudgeWeights


class JudgeLayout(Own):
    """The judge's linear head."""

    name = "judge"
    summary = "the judge's head (foretoken alone)"
    head = JudgeWeights
    config = JudgeHeadConfig
    architectures = ("ForetokenJudge",)
