"""Check an OpenAI-compatible endpoint from outside: any server's, by requests alone.

``certify_endpoint(Endpoint(url), prompts, reference=...)`` returns an ``EndpointCertificate``; ``page`` makes it readable.
docs/certify.md says what is checked, and what is not.
"""

from foretoken.certify.endpoint.client import Endpoint
from foretoken.certify.endpoint.page import html_page, markdown_page
from foretoken.certify.endpoint.report import EndpointCertificate, EndpointCheck, Fault
from foretoken.certify.endpoint.run import certify_endpoint
from foretoken.certify.endpoint.session import EndpointBudget

__all__ = [
    "Endpoint", "EndpointBudget", "EndpointCertificate", "EndpointCheck", "Fault", "certify_endpoint", "html_page",
    "markdown_page",
]  # fmt: skip
