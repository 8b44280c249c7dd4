"""Floor 5: is the output still right? Production decoding on a user's own models, checked against what it must be.

``certify(engine, prompts)`` returns a ``Certificate``. Five checks: ``window`` (p at every node is plain decoding's law),
``draws`` (tokens come from the q that is reported), ``law`` and ``joint`` (a rule emits exactly p), ``tokens`` (the same
text with and without speculation). docs/certify.md says what each covers, and what none of them does.
"""

from foretoken.certify.report import Certificate, Check, Finding
from foretoken.certify.run import Budget, certify

__all__ = ["Budget", "Certificate", "Check", "Finding", "certify"]
