"""The probable meaning of an unknown option: a similar option of ours, or an option of another engine."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

# Least ratios of difflib: for a word that may be meant, and for a word with a letter or two amiss.
_CLOSE, _MISSPELT = 0.7, 0.87
_MODEL = "name the model's folder: MODEL, or --model DIR"
_NOTHING = "leave it out"
_COMPILED = f"{_NOTHING}: every step is a compiled program"
# Options of vLLM, SGLang, llama.cpp and TensorRT-LLM by name: flags, of which the first that the command has
# is meant, and a remark about their values.
_OPTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("tp", "tp-size", "tensor-parallel-size", "tensor-split", "ts", "split-mode", "sm"): (
        "--mesh 1xN, which divides heads and experts over N devices",
    ),
    ("dp", "dp-size", "data-parallel-size"): ("--mesh Nx1, which divides requests over N devices",),
    ("nnodes", "num-nodes"): ("--hosts",),
    ("node-rank",): ("--rank",),
    ("dist-init-addr", "master-addr"): ("--coordinator",),
    (
        "speculative-num-steps",
        "speculative-num-draft-tokens",
        "speculative-tokens",
        "spec-tokens",
        "draft",
        "draft-n",
        "draft-max",
        "depth",
    ): ("--num-speculative-tokens K", "--depth K"),
    (
        "synthetic-acceptance-length",
        "synthetic-acceptance-rates",
        "spec-decode-acceptance-length",
        "simulate-acc-len",
    ): ("--synthetic-acceptance",),
    ("speculative-config",): (
        "--num-speculative-tokens K, and --draft-model DIR for a head",
        "--depth K",
    ),
    ("speculative-model", "speculative-draft-model-path", "model-draft", "md"): ("--draft-model DIR",),
    ("speculative-token-map",): ("--draft-vocab N|FILE",),
    ("gpu-memory-utilization", "mem-fraction-static", "kv-cache-free-gpu-mem-fraction"): (
        "--memory-fraction",
        "--num-pages",
    ),
    ("max-running-requests", "max-batch-size", "max-num-requests", "parallel", "np", "batch-size"): (
        "--max-num-seqs",
        "--batch",
    ),
    ("context-length", "context-len", "ctx-size", "c", "max-seq-len", "max-model-length", "n-ctx"): (
        "--max-model-len",
        "--context",
    ),
    ("block-size", "tokens-per-block"): ("--page-size",),
    (
        "chunked-prefill-size",
        "max-num-batched-tokens",
        "max-num-tokens",
        "max-prefill-tokens",
        "ubatch-size",
        "ub",
    ): ("--prefill-chunk",),
    ("disable-radix-cache", "no-enable-prefix-caching"): ("--no-prefix-cache",),
    ("hicache-storage-backend", "lmcache-config-file"): ("--file-cache",),
    ("swap-space", "kv-offloading-size", "hicache-size", "enable-hierarchical-cache", "cache-ram", "cram"): (
        "--host-cache-gib",
    ),
    ("cache-type-k", "cache-type-v", "ctk", "ctv", "kv-dtype"): ("--kv-cache-dtype",),
    ("speculative-eagle-topk",): ("--tree",),
    ("all2all-backend", "moe-a2a-backend"): ("--expert-exchange",),
    ("enable-eplb", "ep-num-redundant-experts"): ("--redundant-experts N",),
    ("enable-return-routed-experts",): ("--return-routed-experts",),
    ("tool-call-parser",): ("--tool-parser",),
    ("default-chat-template-kwargs",): ("--chat-template-kwargs",),
    ("alias", "model-alias"): ("--served-model-name",),
    ("generation-config",): ("--sampling-defaults",),
    (
        "disable-log-requests",
        "disable-uvicorn-access-log",
        "log-disable",
        "log-level",
        "uvicorn-log-level",
    ): ("--access-log off",),
    ("ssl-certfile", "ssl-cert-file"): ("--tls-cert",),
    ("ssl-keyfile", "ssl-key-file"): ("--tls-key",),
    ("ssl-ca-certs",): ("--tls-ca",),
    ("temp",): ("--temperature",),
    ("n-predict", "predict", "max-new-tokens", "max-output-tokens", "num-predict"): ("--max-tokens",),
    ("repeat-penalty",): ("--repetition-penalty",),
    ("grammar", "grammar-file", "regex", "guided-regex", "guided-decoding-regex"): (
        "--regex",
        "--json-schema",
        "--structured StructuredOutput(regex=...)",
    ),
    ("guided-json", "json"): ("--json-schema", "--structured StructuredOutput(json_schema=...)"),
    ("guided-decoding", "structured-outputs", "guided-choice", "response-format"): (
        "--structured StructuredOutput(...)",
    ),
    ("sampling-seed",): ("--seed",),
    ("system-prompt", "sys"): ("--system",),
    ("input", "prompt-file", "input-file"): ("--file",),
    ("disaggregation-mode", "kv-transfer-config"): ("--role",),
    ("max-concurrency", "max-queue-size", "max-queued"): ("--max-queued-requests", "--concurrency"),
    ("request-timeout", "timeout"): ("--request-seconds",),
    ("cors-allow-origins", "cors-origins"): ("--allowed-origin",),
    ("listen", "bind"): ("--host",),
    ("config-file",): ("--config",),
    ("output", "output-dir"): ("--out", "--json"),
}
_INSTEAD: dict[tuple[str, ...], str] = {
    ("model-path", "model-name-or-path", "m", "hf-repo", "hf"): _MODEL,
    ("tokenizer", "tokenizer-path", "hf-config-path"): f"{_NOTHING}: the model's folder has it",
    ("tokenizer-mode",): f"{_NOTHING}: tokenizer.json says all of it",
    ("hf-overrides", "json-model-override-args", "override-kv"): "edit config.json in the model's folder",
    ("model-impl",): f"{_NOTHING}: config.json says the family",
    (
        "cpu-offload-gb",
        "cpu-offload",
    ): f"{_NOTHING}: all weights must fit the devices; --mesh gives more of them",
    ("pp", "pp-size", "pipeline-parallel-size"): f"{_NOTHING}: layers are not split; --mesh 1xN splits each",
    ("ep", "ep-size", "expert-parallel-size", "enable-expert-parallel"): (
        f"{_NOTHING}: experts are split over the whole --mesh"
    ),
    ("speculative-algorithm", "speculative-algo"): (
        "write --draft-model DIR for a head, whose config.json says its kind; leave both out for NextN layers"
    ),
    ("use-tqdm",): f"{_NOTHING}: nothing is shown while tokens are generated",
    ("prompt-token-ids",): "give the lists of ids as prompts",
    ("best-of",): "take n, and choose among the outputs by their logprobs",
    ("use-beam-search", "beam-width", "length-penalty"): "there are no beams; n samples several texts",
    ("add-generation-prompt", "continue-final-message"): (
        "tokenizer.apply_chat_template has it; encode its text without special tokens, and generate"
    ),
    ("enable-lora", "lora-modules", "lora-paths", "lora", "lora-request", "max-loras", "max-lora-rank"): (
        "LoRA is not supported: merge the adapter into a checkpoint"
    ),
    ("enable-prefix-caching",): f"{_NOTHING}: prefixes are kept unless --no-prefix-cache",
    ("enable-chunked-prefill",): f"{_NOTHING}: prompts always go along in chunks (--prefill-chunk)",
    ("async-scheduling", "disable-overlap-schedule", "no-async-scheduling"): (
        f"{_NOTHING}: a step is always launched before the last one is read"
    ),
    ("cont-batching", "cb"): f"{_NOTHING}: requests always join and leave between steps",
    ("api-server-count", "tokenizer-worker-num"): f"{_NOTHING}: one process serves HTTP",
    ("stream-interval",): f"{_NOTHING}: a stream sends the tokens of every step",
    ("enable-sleep-mode", "enable-memory-saver"): (
        f"{_NOTHING}: memory can always be released (/release_memory_occupation, which needs an admin key)"
    ),
    ("limit-mm-per-prompt", "language-model-only", "mmproj", "enable-multimodal"): (
        f"{_NOTHING}: only text is read"
    ),
    ("chat-template-content-format",): f"{_NOTHING}: templates get the parts of a message as one text",
    ("structured-outputs-config", "guided-decoding-backend", "grammar-backend"): (
        f"{_NOTHING}: llguidance compiles every grammar"
    ),
    ("enable-prompt-tokens-details", "enable-cache-report"): (
        f"{_NOTHING}: usage always has prompt_tokens_details"
    ),
    ("enable-log-requests",): f"{_NOTHING}: a line per request is logged, without its text (--access-log)",
    ("slots", "props"): f"{_NOTHING}: GET /server_info and /metrics tell it",
    ("metrics", "enable-metrics"): f"{_NOTHING}: GET /metrics is always there",
    ("i", "in", "o", "input-file", "output-file"): "`mtp-jax batch IN OUT` takes its files without flags",
    ("enable-auto-tool-choice", "jinja"): f"{_NOTHING}: calls of tools are always taken",
    ("reasoning-parser", "reasoning-format"): f"{_NOTHING}: thoughts are told from answers by their tags",
    ("trust-remote-code",): f"{_NOTHING}: no code of a checkpoint is ever run",
    ("quantization",): f"{_NOTHING}: the checkpoint says how its weights are stored",
    ("enforce-eager", "cuda-graph-max-bs", "disable-cuda-graph", "compilation-config"): _COMPILED,
    ("attention-backend", "flash-attn", "fa"): f"{_NOTHING}, or choose --kernels",
    ("n-gpu-layers", "gpu-layers", "ngl", "device", "main-gpu"): f"{_NOTHING}: JAX finds the devices",
    ("threads", "t"): f"{_NOTHING}: all usable cores are used; taskset limits them",
    ("download-dir", "revision"): f"{_NOTHING}: nothing is downloaded here",
    ("distributed-executor-backend",): f"{_NOTHING}, or add --ray or --hosts",
    ("seed", "random-seed"): "requests say it; one without a seed gets a fresh one",
    ("temperature", "top-p", "top-k", "min-p", "max-tokens", "override-generation-config"): (
        "requests say it, or else the model's generation_config.json (--sampling-defaults)"
    ),
}
# Values of options, by names that other engines give to them.
_VALUES = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"), "fp8"),
    **dict.fromkeys(("half", "float16", "fp16", "f16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float", "fp32", "f32"), "float32"),
}

# Attributes that classes of other engines have.
_ATTRIBUTES = {
    "get_tokenizer": "take tokenizer",
    "get_default_sampling_params": "take default_sampling_params",
    "llm_engine": "take engine",
    "get_metrics": "take engine.stats()",
    "sleep": "take release_memory()",
    "wake_up": "take resume_memory()",
    "reset_prefix_cache": "AsyncLLM has flush_prefix_cache()",
    "beam_search": "there are no beams; n of SamplingParams samples several texts",
    **dict.fromkeys(("encode", "embed", "classify"), "hidden_states() gives the trunk's states"),
    "async_generate": "AsyncLLM has generate()",
    "shutdown": "AsyncLLM has close(); an LLM goes with its last reference",
    "request_id": "outputs stand in the order of their prompts, or come from the call that asked",
    "num_cached_tokens": "take cached_tokens",
    "metrics": "take timing and speculation",
    "cumulative_logprob": "sum the chosen tokens of logprobs",
}

# Flags of the command line as arguments in Python.
_ARGUMENTS = (
    (r"--mesh 1xN", "mesh=make_mesh(1, N)"),
    (r"--mesh Nx1", "mesh=make_mesh(N, 1)"),
    (r"--no-prefix-cache", "prefix_cache=False"),
    (r"(--[a-z-]+) (?=[A-Z])", r"\1="),
)


def advice(unknown: str, flags: Collection[str], elsewhere: Sequence[str] = ()) -> str:
    """A phrase with the option to write instead, among the flags of a command; "" if there is none.

    elsewhere: other commands that have the option.
    """
    name = unknown.partition("=")[0].lstrip("-").replace("_", "-").lower()
    if f"--{name}" in flags:
        return f"write --{name}"
    if close := nearest(f"--{name}", flags, _MISSPELT):
        return f"do you mean {close}?"
    for names, meant in _OPTIONS.items():
        found = next((flag for flag in meant if flag.partition(" ")[0] in flags), None)
        if name in names and found:
            return f"use {found}"
    instead = next((text for names, text in _INSTEAD.items() if name in names), None)
    if instead is not None:
        return instead
    if elsewhere:
        return f"`{'`, `'.join(elsewhere)}` {'have' if elsewhere[1:] else 'has'} it, not this command"
    close = nearest(f"--{name}", flags)
    return f"do you mean {close}?" if close else ""


def python_advice(unknown: str, names: Collection[str]) -> str:
    """The same phrase for an unknown argument in Python; ``names``: the arguments that there are."""
    flags = {f"--{name}".replace("_", "-") for name in names} | {"--no-prefix-cache"}
    text = advice(unknown, flags)
    for pattern, argument in _ARGUMENTS:
        text = re.sub(pattern, argument, text)
    return re.sub(r"--([a-z-]+)", lambda found: found[1].replace("-", "_"), text)


def attribute_advice(name: str) -> str:
    """A phrase with ours in the place of an attribute of another engine; "" if there is none."""
    return _ATTRIBUTES.get(name, "")


def value_meant(word: str, choices: Collection[str]) -> str | None:
    """The choice that a value probably means: another engine's name of it, or the most similar."""
    meant = _VALUES.get(word.lower())
    return meant if meant in choices else nearest(word, choices)


def nearest(word: str, words: Collection[str], least: float = _CLOSE) -> str | None:
    """The most similar word, if one reaches ``least``, a ratio of difflib."""
    return next(iter(get_close_matches(word, words, 1, least)), None)
