"""Floor 6: check the output. Production decoding on a user's own models is compared with the required distributions.

``certify(engine, prompts)`` returns a ``Certificate``. Five checks: ``window`` (p at every node is plain decoding's
distribution), ``draws`` (tokens come from the q that is reported), ``law`` and ``joint`` (a rule emits exactly p),
``tokens`` (the same text with and without speculation). docs/certify.md says what each check covers, and what is not
covered.
"""

from foretell.certify.report import Certificate, Check, Finding, WeightsDistance, weights_distance
from foretell.certify.run import CertifyBudget, certify

__all__ = ["Certificate", "CertifyBudget", "Check", "Finding", "WeightsDistance", "certify", "weights_distance"]
