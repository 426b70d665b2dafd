"""The server's port, encrypted. ``tests/tls/`` has a certificate of localhost that nothing else trusts."""

import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mtp_jax import LLM, ConfigError
from mtp_jax.commands.server_options import address_of
from serve.base.settings import Settings
from serve.base.tls import tls_context
from tests.serve.conftest import SIZES, start, weightless

FILES = Path(__file__).parents[1] / "tls"
CERT, KEY = FILES / "cert.pem", FILES / "key.pem"
BODY = {"prompt": [5, 9], "max_tokens": 3, "ignore_eos": True}


def client(own: bool = False) -> ssl.SSLContext:
    """A client that trusts the certificate, and shows it as its own."""
    context = ssl.create_default_context(cafile=CERT)
    if own:
        context.load_cert_chain(CERT, KEY)
    return context


def answered(url: str, verify: ssl.SSLContext | bool) -> int:
    with httpx2.Client(base_url=url, verify=verify) as http:
        return http.post("/v1/completions", json=BODY).status_code


def test_a_client_that_trusts_the_certificate_is_served(tmp_path: Path) -> None:
    llm = LLM(weightless(tmp_path), simulate=(0.5,), simulated_step=0.0, **SIZES)
    with start(llm, tls_cert=CERT, tls_key=KEY, tls_ca=CERT) as running:
        url = running.url.replace("http://", "https://")
        assert answered(url, client(own=True)) == 200
        for refused in (lambda: answered(url, client()), lambda: answered(running.url, True)):
            with pytest.raises(httpx2.TransportError):
                refused()
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            answered(url, ssl.create_default_context())
        assert answered(url, client(own=True)) == 200


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tls_cert": "nowhere"}, "--tls-cert nowhere: No such file"),
        ({"tls_cert": KEY}, "--tls-cert .*key.pem: "),
        ({"tls_cert": CERT}, "--tls-cert .*cert.pem: .*a certificate, of its key without a password"),
        ({"tls_cert": CERT, "tls_key": CERT}, "--tls-cert .* and --tls-key .*cert.pem: "),
        ({"tls_cert": CERT, "tls_key": FILES / "locked.pem"}, "locked.pem: .*without a password"),
        ({"tls_cert": CERT, "tls_key": KEY, "tls_ca": KEY}, "--tls-ca .*key.pem: "),
        ({"tls_key": KEY}, "tls_key = .*key.pem without tls_cert"),
        ({"tls_ca": CERT}, "tls_ca = .*cert.pem without tls_cert"),
    ],
)
def test_wrong_files_are_told(files: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        tls_context(Settings("tiny", **files))
    assert "\n" not in str(caught.value)


def test_addresses_say_which_it_is() -> None:
    assert address_of(Settings("tiny"), 80) == "http://127.0.0.1:80"
    assert address_of(Settings("tiny", tls_cert=CERT), 443) == "https://127.0.0.1:443"
    assert tls_context(Settings("tiny")) is None
