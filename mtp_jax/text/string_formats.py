"""Expressions (Rust's syntax) for values of JSON Schema's ``format``."""

_HOUR = "([01][0-9]|2[0-3])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = rf"{_HOUR}:[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{{1,9}})?([zZ]|[+-]{_HOUR}:[0-5][0-9])"
_SECONDS = "[0-9]+S"
_MINUTES = f"[0-9]+M({_SECONDS})?"
_CLOCK = f"T([0-9]+H({_MINUTES})?|{_MINUTES}|{_SECONDS})"
_MONTHS = "[0-9]+M([0-9]+D)?"
_DURATION = f"P(([0-9]+Y({_MONTHS})?|{_MONTHS}|[0-9]+D)({_CLOCK})?|{_CLOCK}|[0-9]+W)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"


def _groups(most: int) -> str:
    return f"({_H16}(:{_H16}){{0,{most - 1}}})?" if most else ""


_IPV6 = (
    f"(({_H16}:){{6}}({_H16}:{_H16}|{_IPV4})|({_H16}:){{7}}{_H16}|"
    + "|".join(f"{_groups(before)}::{_groups(7 - before)}" for before in range(8))
    + ")"
)

EXPRESSIONS = {
    "date": _DATE,  # RFC 3339, section 5.6, with the days that a month has
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,  # RFC 3339, appendix A
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}
