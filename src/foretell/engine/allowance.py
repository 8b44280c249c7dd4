"""The share of the serving time that work beside decoding may take."""


class Allowance:
    """A share of the serving time for work that is not decoding: earned as steps end, charged with what was measured.

    It may be overdrawn by one charge, after which nothing is covered until it is earned back. Not thread-safe.
    """

    def __init__(self, share: float, *, most: float = 0.25) -> None:
        """share: of the seconds of steps; most: seconds that it holds at most."""
        self.share, self.most = share, most
        self.credit = most / 10
        self.seconds = 0.0  # charged so far

    def earn(self, seconds: float) -> None:
        """A step took so long."""
        self.credit = min(self.most, self.credit + self.share * seconds)

    def covers(self, seconds: float) -> bool:
        """Whether work that takes this many seconds may begin; where ``most`` is less than that, whether it is full."""
        return self.credit >= min(seconds, self.most)

    def charge(self, seconds: float) -> None:
        """Work has taken so long."""
        self.credit -= seconds
        self.seconds += seconds
