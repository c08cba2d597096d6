"""What the files of the console may not do, whatever a record says: `docs/security.md` names these tests.

ESLint has some of the same rules (`make check-console`), but needs Node.js. The tests in a browser show that the page
does what it should; these show that nothing in it could do otherwise.
"""

from __future__ import annotations

import re

import pytest

from quiver.gateway.console.assets import load_assets

OWN = sorted(name for name in load_assets() if name.endswith(".js") and not name.startswith("vendor-"))


def _code(name: str) -> str:
    """Return a file without its comments."""
    text = load_assets()[name].body.decode()
    return re.sub(r"/\*.*?\*/|(?<=\s)//[^\n]*", "", text, flags=re.DOTALL)


def _everywhere(pattern: str) -> set[str]:
    return {found for name in OWN for found in re.findall(pattern, _code(name))}


@pytest.mark.parametrize("name", OWN)
def test_nothing_makes_elements_or_code_from_text(name: str) -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|DOMParser|srcdoc"
    code = r"\beval\b|\bnew Function\b|\bFunction\(|import\((?!\")|javascript:"
    assert re.findall(f"{sinks}|{code}", _code(name)) == []


def test_storage_of_the_browser_has_the_token_in_the_tab_and_the_theme() -> None:
    assert _everywhere(r"localStorage\.\w+\((\w+)") == {"THEME_KEY"}
    assert _everywhere(r"\bstorage\?*\.\w+\((\w+)") == {"TOKEN_KEY"}
    assert _everywhere(r"storage: ([\w.]+)") == {"window.sessionStorage"}
    assert len(re.findall("sessionStorage", "".join(map(_code, OWN)))) == 1
    assert _everywhere(r"document\.cookie|indexedDB|\bcaches\.|cookieStore|serviceWorker") == set()


def test_page_talks_to_nodes_alone_and_without_cookies() -> None:
    assert _everywhere(r"postMessage|BroadcastChannel|window\.open|XMLHttpRequest|WebSocket|sendBeacon") == set()
    assert _everywhere(r"location\.(?:href|assign|replace)\b") == set()
    code = "".join(map(_code, OWN))
    assert len(re.findall(r"\bthis\.fetch\(", code)) == code.count('credentials: "omit"') > 0
    assert len(re.findall(r"\bfetch\(", code)) == len(re.findall(r"\bthis\.fetch\(", code)) + 1, (
        "the default of a parameter"
    )


def test_fields_of_tokens_and_passwords_hide_what_is_typed_and_take_what_is_pasted() -> None:
    secrets = [
        one
        for one in _everywhere(r"<\$\{Field\} label=\"[^\"]*\"[^/]*")
        if re.match(r'.{9,12}label="(?:Token|Password)"', one)
    ]
    assert len(secrets) >= 3
    assert all('type="password"' in one for one in secrets)
    assert _everywhere("onPaste|onBeforeInput") == set()


def test_no_object_gets_properties_by_names_of_users() -> None:
    """Assigned are known fields and indexes of arrays: `__proto__` is a name like any other."""
    assert _everywhere(r"__proto__|Object\.setPrototypeOf|\.prototype\b") == set()
    assert _everywhere(r"\w+\[[a-zA-Z_.]+\]\s*(?:[?|]{2})?=[^=>][^;\n]*") == set()
