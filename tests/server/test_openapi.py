"""The document is true: its references lead somewhere, and whatever it admits is answered as it says."""

import json
from random import Random
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from foretell.server.app import build_app
from foretell.server.errors import ApiError, parse
from foretell.server.options import ServerOptions
from foretell.server.protocol.anthropic import MessagesRequest
from foretell.server.protocol.ollama import GenerateRequest, OllamaChatRequest, ShowRequest
from foretell.server.protocol.requests import ChatRequest, CompletionRequest, ExplainRequest, LearnerRequest
from foretell.server.protocol.responses import ResponsesRequest
from tests.server.agreement import ODD, Bodies
from tests.server.fake import FakeService
from tests.stress import size

POSTED = {"200", "400", "401", "404", "405", "408", "413", "415", "429", "500", "503"}


@pytest.fixture(scope="module")
def document(fake: httpx.Client) -> Any:
    return fake.get("/openapi.json").json()


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        mine = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return mine.union(*(references(value) for value in node.values())) if node else mine
    return set().union(*(references(value) for value in node)) if isinstance(node, list) and node else set()


def test_every_reference_leads_somewhere(document: Any) -> None:
    found = references(document)
    assert {"#/components/schemas/ChatRequest", "#/components/schemas/ErrorReply"} <= found
    for reference in found:
        node = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
        assert node


def test_names_are_of_things_and_not_of_files(document: Any) -> None:
    """Two models of one name would be told apart by the modules that they stand in."""
    names = set(document["components"]["schemas"])
    assert {"AllowedTools", "AllowedFunctions"} <= names
    assert [name for name in names if "__" in name] == []


def test_every_route_tells_its_answers(document: Any) -> None:
    paths = document["paths"]
    assert set(paths) == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models",
        "/v1/models/{model}", "/v1/embeddings", "/tokenize", "/detokenize", "/props", "/health", "/ready", "/version",
        "/metrics", "/", "/v1/foretell/learner", "/v1/foretell/explain", "/v1/messages", "/v1/messages/count_tokens",
        "/api/chat", "/api/generate", "/api/show", "/api/tags", "/api/version", "/api/ps", "/api/pull",
        "/api/embed", "/api/embeddings", "/infill",
    }  # fmt: skip
    for path, fault in (
        ("/v1/chat/completions", "ErrorReply"), ("/v1/completions", "ErrorReply"), ("/v1/responses", "ErrorReply"),
        ("/v1/messages", "MessageError"), ("/infill", "ErrorReply"),
    ):  # fmt: skip
        responses = paths[path]["post"]["responses"]
        assert set(responses) == POSTED
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert paths[path]["post"]["requestBody"]["required"] is True
        for code in POSTED - {"200"}:
            schema = responses[code]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{fault}"}
    assert "422" not in json.dumps(paths)
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert set(paths["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}


def test_every_field_is_in_it(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, ExplainRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
        assert schemas[kind.__name__]["additionalProperties"] is True
        assert schemas[kind.__name__]["properties"]["model"]["enum"] == ["fake", "", None]


def test_keys_are_in_it_where_they_are_asked_for() -> None:
    document = build_app(FakeService(), ServerOptions(api_keys=("a",))).openapi()  # type: ignore[arg-type]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\0", "none", "auto", "function", "json_schema", "text", "fake"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
BASES: dict[str, Any] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/messages/count_tokens": (MessagesRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/api/chat": (OllamaChatRequest, {"messages": [{"role": "user", "content": "a"}], "stream": False}),
    "/api/generate": (GenerateRequest, {"prompt": "a", "stream": False}),
    "/api/show": (ShowRequest, {}),
    "/v1/foretell/explain": (ExplainRequest, {"prompt": "a"}),
}


@settings(max_examples=size(50, 150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), path=st.sampled_from(sorted(BASES)))
def test_no_value_breaks_it(fake: httpx.Client, data: st.DataObject, path: str) -> None:
    kind, base = BASES[path]
    names = st.sampled_from(sorted(set(kind.model_fields) - {"stream"})) | st.text(max_size=5)
    body = {"model": "fake", **base, **data.draw(st.dictionaries(names, VALUES, max_size=3))}
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = fake.post(path, content=content, headers={"content-type": "application/json"})
    assert str(answer.status_code) in POSTED - {"500", "503"}, answer.text
    assert (answer.json().get("error") is not None) == (answer.status_code != 200)


KINDS = [
    ChatRequest, CompletionRequest, LearnerRequest, ResponsesRequest, MessagesRequest, OllamaChatRequest, GenerateRequest,
]  # fmt: skip


def disagreement(kind: Any, validator: Any, body: dict[str, Any]) -> str | None:
    """What is wrong where the document and what validates requests do not say the same of a body."""
    errors = [error.message for error in validator.iter_errors(body)]
    try:
        parse(kind, json.dumps(body).encode())
    except ApiError as error:
        return None if errors else f"the document admits {body}, and it is refused: {error.message}"
    return f"the document refuses {body} ({errors[0]}), and it is taken" if errors else None


def validator_of(document: Any, kind: Any) -> Any:
    schemas = document["components"]
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{kind.__name__}", "components": schemas})


@pytest.mark.parametrize("path", sorted(BASES))
def test_any_value_of_any_field_is_refused_where_the_document_refuses_it(document: Any, path: str) -> None:
    kind, base = BASES[path]
    validator = validator_of(document, kind)
    bodies = [{**base, name: value} for name in kind.model_fields if name != "model" for value in ODD]
    assert [found for body in bodies if (found := disagreement(kind, validator, body))] == []
    assert 0 < sum(validator.is_valid(body) for body in bodies) < len(bodies)


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_near_the_border_are_judged_as_the_document_says(document: Any, kind: Any) -> None:
    validator = validator_of(document, kind)
    taken = []
    for seed in range(size(60, 600)):
        random = Random(seed)
        bodies = Bodies(document["components"]["schemas"], random, random.choice([0.0, 0.02, 0.05]))
        body = bodies.draw({"$ref": f"#/components/schemas/{kind.__name__}"})
        if isinstance(body, dict):
            body.pop("model", None)
            assert disagreement(kind, validator, body) is None
            taken.append(validator.is_valid(body))
    assert len(set(taken)) == 2, "some are valid, some are not"
