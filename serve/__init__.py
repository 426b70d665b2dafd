"""The HTTP server: OpenAI's and Anthropic's APIs over ``mtp_jax.AsyncLLM``. It adds HTTP and nothing else.

    cluster > http > routes > answers > bodies > base > watch

A folder imports from those to its right alone. web/, grafana/ and deploy/ hold no Python: the chat page, a
dashboard, containers.
"""
