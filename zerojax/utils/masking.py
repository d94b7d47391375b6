"""Masks what looks like a password or a key in configurations and command lines, which a run writes down.

It recognizes names, such as `api_key`, and the forms of well-known tokens. A secret under any other name is not masked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# Words in the name of a value: anywhere, or several in a row.
_SECRET_NAMES = re.compile(
    r"_(apikeys?|secrets?|passwords?|passwd|passphrase|credentials?|authorization|(api|private|access)_keys?)_"
)
# `token` ends the name of a secret. `token_embed` is a layer, and these words make it a token of a vocabulary.
_TOKEN_NAME, _VOCABULARY = re.compile(r"_token_$"), re.compile(r"_(bos|eos|pad|unk|sep|cls|mask|per)_token_$")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_FORMS = re.compile(
    r"""(?<![A-Za-z0-9_])(
        hf_[A-Za-z0-9]{20,}                                     # Hugging Face
        | (sk|glpat)-(?=[\w-]*[0-9])[\w-]{20,}                  # OpenAI, Anthropic; GitLab
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}       # GitHub
        | (AKIA|ASIA)[A-Z0-9]{16}                               # Amazon
        | AIza[\w-]{35}                                         # Google
        | xox[a-z]-[\w-]{10,}                                   # Slack
        | wandb_v[0-9]_\w{20,}                                  # Weights & Biases
        | (?<=[Bb]earer\ )[^\s"']+                              # of a header
    ) | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_URL = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s\"']+)")
_ASSIGNMENT = re.compile(r"""([A-Za-z][\w.-]*)(["']?\s*[=:]\s*["']?)([^\s"',;&]+)""")
_OPTION = re.compile(r"[-+~]*[\w.-]+")
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")


def masked(value: Any, name: str = "") -> Any:
    """Returns a value of a configuration with `MASK` in place of what looks like a secret.

    Args:
        value: JSON data. What is in mappings and sequences is masked too.
        name: of the value. In its words (`api_key`, `apiKey`, `api-key`), these are looked for: token at the end, but
            not as in `pad_token`; api key, private key, access key, secret, password, passwd, passphrase, credentials
            and authorization. All text below such a name is masked, and all numbers, except below token.
    """
    return _masked(value, name, False, False)


def _masked(value: Any, name: str, hides_text: bool, hides_numbers: bool) -> Any:
    hides_text, hides_numbers = hides_text or is_secret_name(name), hides_numbers or _is_password(_words(name))
    if isinstance(value, Mapping):
        return {key: _masked(item, str(key), hides_text, hides_numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, name, hides_text, hides_numbers) for item in value]
    if isinstance(value, str):
        is_key = "wandb" in name.lower() and _WANDB_KEY.fullmatch(value)
        return MASK if value and (hides_text or is_key) else _masked_forms(value)
    return MASK if hides_numbers and isinstance(value, int | float) and not isinstance(value, bool) else value


def is_secret_name(name: str) -> bool:
    """Whether a text with this name is a secret, judging by the words of the name."""
    words = _words(name)
    return _is_password(words) or bool(_TOKEN_NAME.search(words) and not _VOCABULARY.search(words))


def _words(name: str) -> str:
    return f"_{'_'.join(_WORDS.findall(name)).lower()}_"


def _is_password(words: str) -> bool:
    return bool(_SECRET_NAMES.search(words))


def _masked_forms(text: str) -> str:
    text = _IN_URL.sub(MASK, _FORMS.sub(MASK, text))
    return _QUERY.sub(lambda match: f"{match[1]}={MASK}" if is_secret_name(match[1]) else match[0], text)


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command with `MASK` in place of what looks like a secret.

    That is the value in `--api-key abc`, `--api-key=abc`, `API_KEY=abc` and `"api_key": "abc"`, and the forms of tokens
    that `masked` recognizes.
    """
    found, is_value = [], False
    for argument in arguments:
        if is_value and not argument.startswith("-"):
            found.append(MASK)
            is_value = False
            continue
        name, equals, _ = argument.partition("=")
        is_flag, is_secret = argument.startswith("-"), bool(_OPTION.fullmatch(name)) and is_secret_name(name)
        is_value = is_flag and is_secret and not equals
        found.append(f"{name}={MASK}" if equals and is_secret else _masked_text(argument))
    return found


def _masked_text(text: str) -> str:
    """The text of an argument, which may be a program, a header or JSON."""
    assigned = lambda match: f"{match[1]}{match[2]}{MASK}" if is_secret_name(match[1]) else match[0]
    return _ASSIGNMENT.sub(assigned, _masked_forms(text))


def masked_json(text: str, name: str) -> str:
    """Returns the JSON text of a value with this name, masked as by `masked`. Other text is returned as it is."""
    try:
        return json.dumps(masked(json.loads(text), name), sort_keys=True)
    except ValueError:
        return text
