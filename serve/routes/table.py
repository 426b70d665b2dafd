"""The routes of the server.

The application, the access control, /openapi.json, the access log and the metrics read this table.
"""

from serve.bodies.admin import (
    AbortBody,
    ContinueBody,
    HiddenStatesBody,
    PauseBody,
    ReleaseBody,
    ResumeBody,
    UpdateBody,
    VersionBody,
)
from serve.bodies.messages import CountBody, MessagesBody
from serve.bodies.native import GenerateBody
from serve.bodies.responses import ResponsesBody
from serve.bodies.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from serve.routes import (
    admin,
    chat,
    completions,
    engine_info,
    info,
    messages,
    native,
    openapi,
    page,
    responses,
)
from serve.routes.route import Route, Routes

_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")

ROUTES = Routes(
    (
        # Generation, and the work on texts that waits in the same queue.
        Route("/v1/completions", _POST, completions.completions, (CompletionBody,), queued=True),
        Route("/v1/chat/completions", _POST, chat.chat_completions, (ChatBody,), queued=True),
        Route("/v1/responses", _POST, responses.responses, (ResponsesBody,), queued=True),
        Route("/v1/responses/input_tokens", _POST, responses.input_tokens, (ResponsesBody,), queued=True),
        Route("/v1/messages", _POST, messages.messages, (MessagesBody,), queued=True),
        Route("/v1/messages/count_tokens", _POST, messages.count_tokens, (CountBody,), queued=True),
        Route("/generate", _POST, native.generate, (GenerateBody,), queued=True),
        Route("/tokenize", _POST, info.tokenize, (TokenizeChatBody, TokenizeBody), queued=True),
        Route("/detokenize", _POST, info.detokenize, (DetokenizeBody,), queued=True),
        # Facts of the server.
        Route("/v1/models", _GET, info.models),
        Route("/v1/models/{name:path}", _GET, info.model),
        Route("/tokenizer_info", _GET, info.tokenizer_info),
        Route("/version", _GET, info.version),
        Route("/openapi.json", _GET, openapi.openapi),
        Route("/load", _GET, info.load),
        Route("/server_info", _GET, engine_info.server_info, quiet=True),
        Route("/get_server_info", _GET, engine_info.server_info),
        Route("/model_info", _GET, engine_info.model_info),
        Route("/get_model_info", _GET, engine_info.model_info),
        Route("/get_weight_version", _GET, admin.weight_version),
        # Probes and monitors.
        Route("/health", _GET, info.health, access="open", quiet=True),
        Route("/ping", _GET, info.health, access="open", quiet=True),
        Route("/ready", _GET, info.ready, access="open", quiet=True),
        Route("/health_generate", _GET, engine_info.health_generate, quiet=True),
        Route("/metrics", _GET, info.metrics, access="metrics", quiet=True),
        # Changes.
        Route("/flush_cache", _BOTH, info.flush_cache),
        Route("/reset_prefix_cache", _POST, info.flush_cache),
        Route("/abort_request", _POST, admin.abort_request, (AbortBody,)),
        Route("/update_weights_from_disk", _POST, admin.update_weights, (UpdateBody,), "admin"),
        Route("/update_weight_version", _POST, admin.update_weight_version, (VersionBody,), "admin"),
        Route("/pause_generation", _POST, admin.pause, (PauseBody,), "admin"),
        Route("/continue_generation", _POST, admin.unpause, (ContinueBody,), "admin"),
        Route("/release_memory_occupation", _BOTH, admin.release_memory, (ReleaseBody,), "admin"),
        Route("/resume_memory_occupation", _BOTH, admin.resume_memory, (ResumeBody,), "admin"),
        Route("/hidden_states", _POST, admin.hidden_states, (HiddenStatesBody,), "admin"),
        # The chat page.
        *(Route(path, _GET, page.page, access="page", quiet=True) for path in sorted(page.PATHS)),
    )
)
