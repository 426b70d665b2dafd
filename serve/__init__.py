"""The HTTP server: OpenAI's and Anthropic's APIs over ``mtp_jax.AsyncLLM``. It adds HTTP and nothing else.

app.py        routes, start and end         security.py   access control
schema.py     what a request may say        errors.py     OpenAI's error objects
completions.py, chat.py, responses.py, messages.py, native.py, info.py: the routes
calls.py, assistant.py: one call of them    turn.py, blocks.py: thoughts, text and calls of tools in an output
tools.py      what a request says of tools  answers.py    pieces of replies
metrics.py    Prometheus                    run.py        sockets, signals, watchdog
access_log.py, stats_log.py: lines in the log    acceptance.py the alarm of drafts that fail
in_process.py requests without a socket     cluster/      engines on Ray
"""
