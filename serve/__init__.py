"""The HTTP server: an OpenAI-compatible API over ``mtp_jax.AsyncLLM``. It adds HTTP and nothing else.

app.py        routes, start and end         security.py   access control
schema.py     what a request may say        errors.py     OpenAI's error objects
completions.py, chat.py, native.py, info.py: the routes;  answers.py: what they reply
metrics.py    Prometheus                    run.py        sockets, signals, watchdog
access_log.py a line per request
"""
