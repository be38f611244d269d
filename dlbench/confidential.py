"""Recognises names and values of environment variables that may be secrets and must not be recorded.

It is a guess by their form, on the safe side; variables of `launch.environment` are never recorded.
"""

from __future__ import annotations

import re

_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|BEARER|CREDENTIAL|COOKIE|PRIVATE|SIGNATURE|JWT|OAUTH"
    r"|AUTH(?!ORS?(_|$))"  # UCX_AUTH, OMPI_MCA_x_authentication
    r"|_KEY|(ACCESS|ACCOUNT|API|ENCRYPTION|LICENSE|MASTER|SECRET|SHARED|SIGNING|SSH)KEY|^KEY"  # not NCCL_IB_PKEY
    r"|(^|_)(PASS|PWD|PW|CREDS?|DSN|SAS)(_|$)",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/?#\s]*@"  # a URL with a user or a password in it
    r"|\bbearer[ :=]+\S|\bbasic [a-z0-9+/]{8,}=*$"
    r"|(password|passwd|passphrase|secret|token|credential|[-_]key|(access|account|api|shared|signing)key"
    r"|\b(pass|pwd?|sig|sas))\\*[\"']?\s*[=:]\s*\S"  # in JSON a quote ends the key, in nested JSON \" does
    r"|(?<!\S)-p(?=\S*[0-9])(?=\S*[a-z])[^\s=]{6,}"  # a password as clients of databases take it: -phunter2
    r"|\beyJ[A-Za-z0-9_-]{10,}\."  # a JSON web token
    # Prefixes that services give their keys, so that they are found where they should not be.
    r"|\b(gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|[a-z]{2}_(live|test)_|whsec_|npm_|pypi-|AKIA|ASIA|AIza|hf_)"
    r"[A-Za-z0-9_-]{10,}"
    r"|-----BEGIN ",
    re.IGNORECASE,
)
_MIXED = re.compile(r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9+=_]{32,}")


def is_secret_name(name: str) -> bool:
    """Returns whether a variable of this name may hold a secret."""
    return _NAME.search(name) is not None


def is_secret_value(value: str) -> bool:
    """Returns whether a text may be a secret: a URL with a password, a known form of token, or a long random string.

    Paths may contain long random strings (folders of Spack and Nix are named by digests).
    """
    return _VALUE.search(value) is not None or ("/" not in value and _MIXED.search(value) is not None)
