"""``foretell`` with a route more, as a program: GET /debug/integrity adds up the engine's books between two steps."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foretell.cli.main import main
from foretell.server import app
from tests.engine.integrity import check_service


async def integrity(request: Request) -> Response:
    await asyncio.to_thread(check_service, request.app.state.backend.service)
    return JSONResponse({"status": "ok"})


if __name__ == "__main__":
    app._routes().get("/debug/integrity", response_model=None, include_in_schema=False)(integrity)
    main()
