"""Fields of other servers that would change an answer: all are refused, but for values that change nothing.

An answer without such a field is another answer, and few clients show the warning of unknown fields.
"""

from typing import Any, ClassVar

from pydantic import model_validator

from serve.bodies.fields import Body

_GRAMMAR = "use response_format or structured_outputs"
_NO_BEAMS = "leave it out: there is no beam search"
_NO_LAW = "leave it out: use temperature, top_p, top_k, min_p or penalties"
_ONE_MODEL = "leave it out: the server has one model, with the weights that it was started with"
_TEXTS = "leave it out: the model reads and writes text alone"
CHAT = "use /v1/chat/completions for it"

# Fields by the advice for them; each with the values that change nothing beside null, and if there are
# none, beside false and empty values.
_TABLE: dict[str, dict[str, tuple[object, ...]]] = {
    _GRAMMAR: dict.fromkeys(
        (
            "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf",
            "grammar", "structural_tag", "response_schema", "format",
        ),
        (False, "", []),  # an empty schema means any JSON
    ),
    "leave it out: tokens are sampled, or the likeliest with temperature = 0": {"use_beam_search": ()},
    _NO_BEAMS: {"length_penalty": (1,), "early_stopping": (), "num_beams": (1,), "beam_width": (1,)},
    "use temperature = 0 for the likeliest tokens": {"do_sample": (True,)},
    _NO_LAW: {
        "typical_p": (1,), "typical": (1,), "tfs_z": (1,), "tfs": (1,), "top_a": (0,), "top_n_sigma": (0, -1),
        "nsigma": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "dry_multiplier": (0,),
        "xtc_probability": (0,), "mirostat": (0,), "mirostat_mode": (0,), "dynatemp_range": (0,),
        "smoothing_factor": (0,), "penalty_alpha": (0,), "guidance_scale": (1,), "cfg_scale": (1,),
        "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "samplers": (), "sampler_order": (),
    },
    "use logit_bias, allowed_token_ids, bad_words or structured_outputs": {
        "logits_processors": (), "custom_logit_processor": (), "custom_params": (), "vllm_xargs": (),
    },
    "use stop": {"stop_regex": (), "stop_sequences": (), "stop_words": ()},
    "use n": {"best_of": (1,)},
    "use max_tokens": {"max_length": ()},
    "use the fields of this API, such as max_tokens": {"options": (), "parameters": ()},
    "leave it out: an answer does not repeat its prompt; /v1/completions has it": {"echo": (False,)},
    "put it into the messages or the prompt": {"documents": (), "system": (), "instructions": ()},
    "send the fields in it beside the others": {"extra_body": ()},
    "send token ids": {"prompt_embeds": (), "input_embeds": ()},
    "leave it out: this server stores no session": {"session_params": ()},
    "use top_logprobs_num": {"token_ids_logprob": ()},
    "leave it out: the checkpoint's own is used": {"chat_template": (), "template": ()},
    "render the prompt elsewhere and send it to /v1/completions": {
        "add_special_tokens": (False,), "add_bos_token": (False,), "transforms": (),
    },
    CHAT: {
        "include_reasoning": (True,), "separate_reasoning": (True,),
        "reasoning_format": ("auto", "deepseek", "parsed"), "return_tokens_as_token_ids": (False,),
    },
    "use tools": {"functions": (), "plugins": ()},
    "use tool_choice": {"function_call": ()},
    "leave it out: the server searches nothing": {"web_search_options": ()},
    _TEXTS: {
        "modalities": (["text"], []), "audio": (), "images": (), "image_data": (), "video_data": (),
        "audio_data": (), "multi_modal_data": (), "mm_processor_kwargs": (),
    },
    _ONE_MODEL: dict.fromkeys(
        ("lora_path", "lora_request", "adapter", "adapter_id", "adapters", "models", "route"), ()
    ),
    "use /hidden_states": {"return_hidden_states": ()},
    "use /generate, which has it beside sampling_params": {
        "return_routed_experts": (), "routed_experts_start_len": (0,),
    },
    "leave it out: the server itself finds pages that others have": {
        "kv_transfer_params": (), "bootstrap_host": (), "bootstrap_room": (),
    },
}  # fmt: skip
EMPTY: tuple[object, ...] = (False, "", [], {})
_KNOWN = {
    name: (advice, values or EMPTY) for advice, fields in _TABLE.items() for name, values in fields.items()
}


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value changes nothing: it is null, or one of ``neutral``; true is not 1, nor false 0."""
    same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
    return value is None or any(same)


class Refusing(Body):
    """A body that refuses fields of other servers that would change the answer.

    Attributes:
        obeyed: names of the table that change nothing on this route.
    """

    without_effect: ClassVar = frozenset(_KNOWN)
    obeyed: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _refuses_foreign_fields(self) -> Any:
        for name, value in (self.model_extra or {}).items():
            advice, neutral = _KNOWN.get(name, ("", ()))
            if advice and name not in self.obeyed and not is_neutral(value, neutral):
                raise ValueError(f"{name}: not supported here; {advice}")
        return self
