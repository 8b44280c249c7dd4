"""Check an OpenAI-compatible endpoint from outside: any server's, by requests alone.

``certify_endpoint(Endpoint(url), prompts, reference=...)`` returns an ``EndpointCertificate``.
docs/certify.md says what is checked, and what is not.
"""

from foretell.certify.endpoint.client import Endpoint
from foretell.certify.endpoint.report import EndpointBudget, EndpointCertificate, EndpointCheck, Fault
from foretell.certify.endpoint.run import certify_endpoint

__all__ = [
    "Endpoint", "EndpointBudget", "EndpointCertificate", "EndpointCheck", "Fault", "certify_endpoint",
]  # fmt: skip
