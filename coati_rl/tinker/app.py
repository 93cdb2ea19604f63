"""Make the application of a server of Tinker's API: its routes, who a key belongs to, and the form of its errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from coati_rl.tinker.api_error import handle_errors
from coati_rl.tinker.record_routes import RecordRoutes
from coati_rl.tinker.sampling_routes import sampling_router
from coati_rl.tinker.service import Service
from coati_rl.tinker.session_routes import session_router
from coati_rl.tinker.training_routes import TrainingRoutes

PREFIX = "/api/v1"


def make_app(service: Service) -> FastAPI:
    """Return the application of a service, which starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    handle_errors(app)
    app.include_router(session_router(service), prefix=PREFIX)
    app.include_router(TrainingRoutes(service).router(), prefix=PREFIX)
    app.include_router(sampling_router(service), prefix=PREFIX)
    app.include_router(RecordRoutes(service, prefix=PREFIX).router(), prefix=PREFIX)
    return app
