"""Who may call the console: Host, Origin, sessions, forms of another session, others' studies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from chorister.clock import SettableClock
from chorister.console.access import HEADERS, cookie_name, origins_of
from chorister.console.app import build_app
from chorister.console.workspace import Workspace
from tests.console.world import TOKENS, open_workspace
from tests.keyboard import ANALYSIS

ORIGIN = "http://127.0.0.1:8090"
COOKIE = "chorister_console_8090"
STUDY = "/studies/rehearsal/ada/mine"
NOW = 1_800_000_000


class Site:
    """A console, and visitors of it."""

    def __init__(self, folder: Path) -> None:
        self.workspace: Workspace = open_workspace(folder)[0]
        self.clock = SettableClock(NOW)
        origins = origins_of("127.0.0.1", 8090, None)
        self.app: ASGIApp = build_app(self.workspace, self.clock, origins=origins, warm=False)

    def visitor(self) -> TestClient:
        return TestClient(
            self.app, base_url=ORIGIN, follow_redirects=False, headers={"origin": ORIGIN}
        )

    def signed_in(self, name: str) -> TestClient:
        client = self.visitor()
        answer = client.post("/sign-in", data={"token": TOKENS[name]})
        assert answer.status_code == 303
        return client


def csrf(client: TestClient) -> str:
    return client.get("/").text.split('name="csrf" value="')[1].split('"')[0]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def begin(client: TestClient, name: str = "mine") -> None:
    form = {"csrf": csrf(client), "name": name, "about": f"rehearsal/{ANALYSIS}"}
    assert client.post("/studies", data=form).status_code == 303


def test_nothing_is_shown_to_strangers(site: Site) -> None:
    for path in ("/", STUDY, "/recipes", "/privacy", STUDY + "/events", "/devices"):
        answer = site.visitor().get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in"), path
    assert site.visitor().post("/studies", data={"name": "x"}).headers["location"] == "/sign-in"


def test_a_wrong_token_is_refused(site: Site) -> None:
    client = site.visitor()
    for token in ("", "incorrect", TOKENS["ada"][:-1], TOKENS["ada"] + "x", "\ud800é"):
        data = {"token": token.encode("utf-8", "surrogatepass")}
        answer = client.post("/sign-in", data=data)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert token not in answer.text or not token


def test_the_cookie_is_kept_from_scripts_and_other_sites(site: Site) -> None:
    answer = site.visitor().post("/sign-in", data={"token": TOKENS["ada"]})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie


def test_every_answer_has_the_headers(site: Site) -> None:
    ada = site.signed_in("ada")
    for path in ("/", "/sign-in", "/nowhere", "/static/htmx.min.js", "/healthz", "/privacy"):
        headers = ada.get(path).headers
        for name, value in HEADERS.items():
            assert headers[name] == value, (path, name)
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert ada.get("/").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:80", "localhost:8091", "", "127.0.0.1:8090.x"]
)
def test_another_host_is_refused(site: Site, host: str) -> None:
    assert site.signed_in("ada").get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8091"},
        {"origin": "https://127.0.0.1:8090"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": ORIGIN},
    ],
)
def test_another_origin_changes_nothing(site: Site, headers: dict[str, str]) -> None:
    ada = site.signed_in("ada")
    form = {"csrf": csrf(ada), "name": "mine", "about": f"rehearsal/{ANALYSIS}"}
    if "origin" not in headers:
        del ada.headers["origin"]
    assert ada.post("/studies", data=form, headers=headers).status_code == 403
    assert site.workspace.visible("ada") == []


def test_without_an_origin_nothing_is_changed(site: Site) -> None:
    ada = site.signed_in("ada")
    form = {"csrf": csrf(ada), "name": "mine", "about": f"rehearsal/{ANALYSIS}"}
    del ada.headers["origin"]
    assert ada.post("/studies", data=form).status_code == 403
    same = {"sec-fetch-site": "same-origin"}
    assert ada.post("/studies", data=form, headers=same).status_code == 303


def test_a_form_of_another_session_is_refused(site: Site) -> None:
    ada, ben = site.signed_in("ada"), site.signed_in("ben")
    for token in ("", "x", csrf(ben), csrf(ada)[:-1]):
        form = {"csrf": token, "name": "mine", "about": f"rehearsal/{ANALYSIS}"}
        answer = ada.post("/studies", data=form)
        assert answer.status_code == 403
        assert "reload the page" in answer.text
    assert site.workspace.visible("ada") == []


def test_a_planted_session_is_worth_nothing(site: Site) -> None:
    victim = site.visitor()
    victim.cookies.set(COOKIE, "planted-by-somebody-else")
    answer = victim.post("/sign-in", data={"token": TOKENS["ada"]})
    new = answer.headers["set-cookie"].split("=")[1].split(";")[0]
    assert new != "planted-by-somebody-else"
    attacker = site.visitor()
    attacker.cookies.set(COOKIE, "planted-by-somebody-else")
    assert attacker.get("/").status_code == 303


def test_signing_in_anew_and_signing_out_end_a_session(site: Site) -> None:
    ada = site.signed_in("ada")
    old = ada.cookies[COOKIE]
    assert ada.post("/sign-in", data={"token": TOKENS["ada"]}).status_code == 303
    thief = site.visitor()
    thief.cookies.set(COOKIE, old)
    assert thief.get("/").status_code == 303
    kept = ada.cookies[COOKIE]
    assert ada.post("/sign-out", data={"csrf": csrf(ada)}).status_code == 303
    thief.cookies.set(COOKIE, kept)
    assert thief.get("/").headers["location"] == "/sign-in"


def test_two_consoles_on_one_host_keep_their_sessions(site: Site, tmp_path: Path) -> None:
    """A browser has one jar for all ports: signing in to the other one signs nobody out."""
    folder = tmp_path / "other"
    folder.mkdir()
    workspace, origin = open_workspace(folder)[0], "http://127.0.0.1:8091"
    app = build_app(workspace, site.clock, origins=origins_of("127.0.0.1", 8091, None), warm=False)
    other = TestClient(app, base_url=origin, follow_redirects=False, headers={"origin": origin})
    ada = site.signed_in("ada")
    assert other.post("/sign-in", data={"token": TOKENS["ada"]}).status_code == 303
    ada.cookies.update(other.cookies)
    other.cookies.update(ada.cookies)
    assert ada.get("/").status_code == other.get("/").status_code == 200


@pytest.mark.parametrize(
    ("host", "port", "url", "name"),
    [
        ("127.0.0.1", 80, None, "chorister_console_80"),
        ("::1", 8090, None, "chorister_console_8090"),
        ("127.0.0.1", 8090, "https://console.example", "__Host-chorister_console_443"),
        ("127.0.0.1", 8090, "https://console.example:8443", "__Host-chorister_console_8443"),
    ],
)
def test_the_cookies_name(host: str, port: int, url: str | None, name: str) -> None:
    assert cookie_name(origins_of(host, port, url)) == name


def test_a_session_ends_by_itself(site: Site) -> None:
    ada = site.signed_in("ada")
    site.clock.set(NOW + 12 * 3600 - 1)
    assert ada.get("/").status_code == 200
    site.clock.set(NOW + 12 * 3600)
    assert ada.get("/").status_code == 303


PLACES = [
    ("GET", ""), ("GET", "/ask"), ("POST", "/ask"), ("POST", "/ask/cost"), ("GET", "/events"),
    ("GET", "/rounds/1"), ("GET", "/rounds/1/chart.svg"), ("GET", "/rounds/1/result.csv"),
    ("GET", "/rounds/1/recipe.json"), ("POST", "/rounds/1/cancel"), ("POST", "/rounds/1/wait"),
    ("GET", "/run/ngrams"), ("POST", "/run/ngrams"), ("POST", "/run/ngrams/plan"),
    ("GET", "/runs/1"), ("GET", "/runs/1/picture.svg"), ("POST", "/runs/1/go-on"),
    ("POST", "/share"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "place"), PLACES)
def test_anothers_study_is_not_there(site: Site, method: str, place: str) -> None:
    begin(site.signed_in("ada"))
    ben = site.signed_in("ben")
    token = csrf(ben)

    def ask(name: str) -> tuple[int, str]:
        path = f"/studies/rehearsal/ada/{name}{place}"
        if method == "GET":
            answer = ben.get(path)
        else:
            answer = ben.post(path, data={"csrf": token, "analyst": "ben", "permission": "ask"})
        return answer.status_code, answer.text.replace(name, "")

    assert ask("mine")[0] == 404
    assert ask("mine") == ask("none")  # not even whether there is one
    assert "mine" not in ben.get("/").text
    assert "mine" not in ben.get("/recipes").text


def test_sharing_to_look_and_to_ask(site: Site) -> None:
    ada, ben = site.signed_in("ada"), site.signed_in("ben")
    begin(ada)
    share = {"csrf": csrf(ada), "analyst": "ben", "permission": "look"}
    assert ada.post(STUDY + "/share", data=share).status_code == 303
    assert ben.get(STUDY).status_code == 200
    assert "mine" in ben.get("/").text
    assert ben.get(STUDY + "/ask").status_code == 403
    own = {"csrf": csrf(ben)}
    assert ben.post(STUDY + "/ask", data=own).status_code == 403
    grab = {**own, "analyst": "ben", "permission": "ask"}
    assert ben.post(STUDY + "/share", data=grab).status_code == 422
    assert ada.post(STUDY + "/share", data={**share, "permission": "ask"}).status_code == 303
    assert ben.get(STUDY + "/ask").status_code == 200
    assert ada.post(STUDY + "/share", data={**share, "permission": "none"}).status_code == 303
    assert ben.get(STUDY).status_code == 404


def test_a_study_is_not_shared_with_whom_the_fleet_is_closed_to(site: Site) -> None:
    ada, cleo = site.signed_in("ada"), site.signed_in("cleo")
    begin(ada)
    share = {"csrf": csrf(ada), "analyst": "cleo", "permission": "look"}
    assert ada.post(STUDY + "/share", data=share).status_code == 422
    assert cleo.get(STUDY).status_code == 404
    form = {"csrf": csrf(cleo), "name": "own", "about": f"rehearsal/{ANALYSIS}"}
    assert cleo.post("/studies", data=form).status_code == 422


def test_shares_survive_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path)
    ada = site.signed_in("ada")
    begin(ada)
    share = {"csrf": csrf(ada), "analyst": "ben", "permission": "look"}
    ada.post(STUDY + "/share", data=share)
    assert Site(tmp_path).signed_in("ben").get(STUDY).status_code == 200


def test_a_form_has_limits(site: Site) -> None:
    ada = site.signed_in("ada")
    large = b"csrf=" + b"x" * 2_000_001
    assert ada.post("/studies", content=large).status_code == 413
    many = b"&".join(b"a=b" for _ in range(2_001))
    assert ada.post("/studies", content=many).status_code == 413


def test_strangers_fill_no_memory_with_forms(site: Site) -> None:
    """Anybody may try to sign in, on every connection of the console at once."""
    token = b"token=" + TOKENS["ada"].encode() + b"&x="
    assert site.visitor().post("/sign-in", content=token + b"x" * 1_000).status_code == 303
    assert site.visitor().post("/sign-in", content=token + b"x" * 20_000).status_code == 413


def test_no_page_hides_a_part_of_a_question(site: Site) -> None:
    """Values may hold what queries may not: it is spelled out where a recipe is reviewed."""
    ada = site.signed_in("ada")
    begin(ada)
    form = {
        "csrf": csrf(ada),
        "use:keyboard.ngram": "on",
        "kind:keyboard.ngram": "categories",
        "values:keyboard.ngram": "how\nare\u202eyou",
        "query": "SELECT ngram AS ngram FROM keyboard WHERE 'a\u200db' <> ''",
    }
    answer = ada.post(f"{STUDY}/ask", data=form)
    assert answer.status_code == 303, answer.text
    page = ada.get(f"{STUDY}/rounds/1").text
    assert "&#39;a\\u{200d}b&#39;" in page
    deadline = time.monotonic() + 30
    while 'aria-label="Estimates"' not in page:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        page = ada.get(f"{STUDY}/rounds/1").text
    assert "are\\u{202e}you" in page
    assert "\u202e" not in page
    recipes = ada.get("/recipes").text
    assert "are\\u{202e}you" in recipes
    assert "\u202e" not in recipes
    form |= {"query": "SELECT ngram AS ngram FROM keyboard WHERE 'a\u202eb' <> ''"}
    answer = ada.post(f"{STUDY}/ask", data=form)
    assert answer.status_code == 422
    assert "U+202E" in answer.text
