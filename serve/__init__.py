"""The HTTP server: OpenAI's and Anthropic's APIs over ``mtp_jax.AsyncLLM``. It adds HTTP and nothing else.

    cluster > http > routes > answers > bodies > base > watch

A folder imports only from folders to its right. web/, grafana/ and deploy/ hold no Python: the chat page, a
dashboard, containers.
"""
