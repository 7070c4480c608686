"""`POST /tokenize` and `POST /detokenize`: the same ids that the generation endpoints use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hexad.application.api.body import read_object
from hexad.application.api.fields import read
from hexad.application.api.health import json_response
from hexad.application.api.job import ignored_header
from hexad.application.api.logprobs import raw_token, show
from hexad.application.api.prompts import Prompt, checked_ids, from_text, prompt_of
from hexad.application.api.schema import DetokenizeRequest, TokenizeRequest
from hexad.application.api.state import ServerState
from hexad.common.errors import RequestError


async def tokenize(state: ServerState, http: Request) -> Response:
    """Ids of a prompt, or of messages after the chat template."""
    request, ignored = read(await read_object(http, state.bodies), TokenizeRequest)
    state.resolve_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    prompt = await state.in_thread(_prompt, state, request)
    answer = {"count": len(prompt.ids), "max_model_len": state.context, "tokens": prompt.ids}
    if request.return_token_strs:
        answer["token_strs"] = [show(raw_token(state.tokenizer, token_id)) for token_id in prompt.ids]
    response = json_response(answer)
    response.headers.update(ignored_header(ignored))
    return response


def _prompt(state: ServerState, request: TokenizeRequest) -> Prompt:
    if request.messages is None:
        assert request.prompt is not None
        return from_text(state, request.prompt, request.add_special_tokens is not False, whole=False)
    return prompt_of(state, request)


async def detokenize(state: ServerState, http: Request) -> Response:
    """Text of ids, special tokens included."""
    request, ignored = read(await read_object(http, state.bodies), DetokenizeRequest)
    state.resolve_model(request.model)
    ids = checked_ids(state, request.tokens, "tokens")
    text = await state.in_thread(lambda: state.tokenizer.decode(ids, skip_special_tokens=False))
    response = json_response({"prompt": text})
    response.headers.update(ignored_header(ignored))
    return response
