"""Servers, as the tests of the server have them."""

from tests.server.conftest import serve

__all__ = ["serve"]
