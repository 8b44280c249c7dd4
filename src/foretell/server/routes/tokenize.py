"""``/tokenize`` and ``/detokenize``, in vLLM's form and in llama.cpp's: the field that a text is given in tells which."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell.server.answer import backend_of, in_worker, read_json
from foretell.server.backend import Backend
from foretell.server.errors import bad
from foretell.server.protocol.requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from foretell.server.routes.chat import prompt_of
from foretell.server.stream import JsonReply, while_connected

OF_CHATS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation by the model's template."""
    body = await read_json(request, TokenizeRequest)
    backend = await backend_of(request, body.model)
    work = in_worker(backend, lambda: _tokenized(backend, body))
    return JsonReply(await while_connected(request.receive, work))


async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones too."""
    body = await read_json(request, DetokenizeRequest)
    backend = await backend_of(request, body.model)
    beyond = [token for token in body.tokens if token >= backend.vocab_size]
    if beyond:
        raise bad(f"tokens: token id {beyond[0]} is not one of 0 to {backend.vocab_size - 1}", "tokens")
    if backend.tokenizer is None:
        raise bad("this model has no tokenizer, so its tokens have no text", "tokens")
    text = await in_worker(backend, lambda: str(backend.tokenizer.decode(body.tokens)))
    return JsonReply({"prompt": text, "content": text})


def _tokenized(backend: Backend, body: TokenizeRequest) -> dict[str, Any]:
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad(f"give one of prompt, content and messages; found {' and '.join(given) or 'none'}", "prompt")
    (field,) = given
    if field == "messages":
        chat = {name: getattr(body, name) for name in OF_CHATS if getattr(body, name) is not None}
        ids = prompt_of(backend, ChatRequest.model_construct(**chat))
    else:
        asked = body.add_special_tokens if field == "prompt" else bool(body.add_special)
        text = body.prompt if body.prompt is not None else body.content or ""
        if body.parse_special is False:
            ids = backend.encode_content(text, field)
        else:
            ids = backend.encode(text, field, special=asked is not False)
    texts = backend.texts.text
    if field == "content":
        pieces = [{"id": token, "piece": texts(token)} for token in ids]
        return {"tokens": pieces if body.with_pieces else ids}
    strings = [texts(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": backend.max_model_len, "tokens": ids, "token_strs": strings}
