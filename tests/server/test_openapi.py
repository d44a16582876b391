"""The description of the API: valid, and of exactly what is served."""

from openapi_spec_validator import validate
from starlette.routing import Route

from server.app import make_app
from server.backends import Backends
from server.openapi import document
from server.options import HttpOptions


def test_it_is_a_valid_description():
    validate(document())


def test_it_describes_every_route_and_nothing_else():
    app = make_app(Backends(["tiny"], "test"), HttpOptions(model_name="tiny"))
    served = set()
    for route in app.routes:
        assert isinstance(route, Route)
        if not route.include_in_schema:
            continue  # for people and tools that know it: metrics, the dashboard, Ollama's API
        path = route.path.replace(":path}", "}")
        served |= {(path, method.lower()) for method in (route.methods or {"GET"}) - {"HEAD"}}
    described = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert served == described
