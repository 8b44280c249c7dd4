"""The playground in a real browser, against a server that has no model: what a user sees, types and is told."""

import base64
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foretell import web

pytest.importorskip("fastapi", reason="the mock server needs fastapi")
pytest.importorskip("uvicorn", reason="the mock server needs uvicorn")
playwright = pytest.importorskip("playwright.sync_api", reason="the playground is tested through Playwright")

from tests.web.mock import TEXT, THOUGHT, Mock, cut, serve, token_id  # noqa: E402

CHROMIUM = Path("/usr/bin/chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser: {CHROMIUM} is missing")
expect = playwright.expect
expect.set_options(timeout=20_000)  # a busy machine is no bug
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


def in_depth(test: Callable[..., None]) -> Callable[..., None]:
    """In a browser too: the default run has a few tests of the page, the slow one the others."""
    return pytest.mark.slow(needs_chromium(test))


@dataclass
class Visit:
    """An open page and all that it asked for and complained about."""

    page: Any
    mock: Mock
    complaints: list[str] = field(default_factory=list)  # errors and warnings of the console, uncaught errors
    requests: list[str] = field(default_factory=list)

    def run(self, prompt: str, **fields: str) -> None:
        """Fill the form and press Ctrl+Enter."""
        self.page.fill("#prompt", prompt)
        for name, value in fields.items():
            self.page.fill(f"#{name}", value)
        self.page.keyboard.press("Control+Enter")

    def ends(self, words: str) -> None:
        """Wait for what the status line says at the end."""
        expect(self.page.locator("#status")).to_contain_text(words)

    def style(self, selector: str, name: str) -> str:
        return self.page.locator(selector).first.evaluate("(element, name) => getComputedStyle(element)[name]", name)

    def focused(self) -> str:
        """The id of what has the focus, or the id of the nearest element around it that has one."""
        return self.page.evaluate("document.activeElement.closest('[id]')?.id ?? 'body'")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def mock() -> Iterator[Mock]:
    with serve() as running:
        yield running


@pytest.fixture
def visit(browser: Any, mock: Mock) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def opened(*, scheme: str = "light", size: dict[str, int] = DESKTOP) -> Visit:
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.set_default_timeout(20_000)
        contexts.append(context)
        visit = Visit(context.new_page(), mock)
        visit.page.on("console", lambda said: said.type in ("error", "warning") and visit.complaints.append(said.text))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.goto(mock.url)
        return visit

    yield opened
    for context in contexts:
        context.close()


# ---- without a browser


def test_page_is_one_text_without_other_addresses() -> None:
    html = web.page()
    assert not re.search(r"<(script|link)[^>]*\s(src|href)=(?!\"data:)", html), "a script or style that is not inside"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html), "an address outside the server"
    assert not re.search(r"\s(style|on\w+)=", re.sub(r"<script>.*?</script>", "", html, flags=re.S)), (
        "inline, forbidden"
    )
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)


def test_csp_allows_exactly_the_texts_of_the_page() -> None:
    directives = dict(part.split(" ", 1) for part in web.csp().split("; "))
    for tag in ("style", "script"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", web.page(), flags=re.S)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert texts
        assert directives[f"{tag}-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in web.csp()


# ---- a run


@needs_chromium
def test_a_run_streams_both_texts_and_says_that_they_are_identical(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("def fibonacci(n):", seed="7")
    seen.ends("Identical texts")
    page = seen.page
    assert page.locator("#guessed .output").text_content() == TEXT
    assert page.locator("#plain .output").text_content() == TEXT
    ratio = r"Identical texts, \d+\.\d\d × the tokens per second in one run each\."
    assert re.fullmatch(ratio, page.inner_text("#verdict-line"))
    assert "Seed 7." in page.inner_text("#verdict-note")
    figure = {
        name: page.inner_text(f"#guessed [data-figure={name}] dd") for name in ("rate", "length", "steps", "first")
    }
    assert float(figure["rate"]) > 0
    assert figure["length"] == "3.29"
    assert figure["steps"] == "28"
    assert figure["first"].endswith(("ms", "s"))
    assert page.inner_text("#guessed [data-figure=accepted] dd") == "33 %"
    assert page.inner_text("#plain [data-figure=steps] dd") == page.inner_text("#plain .ended").split()[0]
    first, second = seen.mock.bodies
    assert first["prompt"] == second["prompt"] == "def fibonacci(n):"
    assert first["seed"] == second["seed"] == 7
    assert "speculative" not in first, "the server's own choice, where it pays"
    assert second["speculative"] == {"method": "none"}
    assert first["stream_options"] == {"include_usage": True}
    assert first["provenance"]
    assert first["trace"]
    assert not seen.complaints
    assert all(url.startswith((seen.mock.url, "data:")) for url in seen.requests)


@in_depth
def test_a_fresh_seed_is_the_same_in_both_runs(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("x", max_tokens="12")
    seen.ends("Identical texts")
    first, second = seen.mock.bodies
    assert first["seed"] == second["seed"]
    assert f"Seed {first['seed']}." in seen.page.inner_text("#verdict-note")
    assert seen.page.inner_text("#guessed .ended") == "12 tokens, cut at the limit"


@needs_chromium
def test_chat_method_and_guesses_reach_the_server(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.template = "a template"
    seen = visit()
    page = seen.page
    expect(page.locator("#guesses")).to_have_attribute("placeholder", "4")  # the server's default
    assert page.locator("#method option").all_inner_texts() == [
        "default: draft_model", "draft_model", "ngram", "suffix", "none: plain decoding",
    ]  # fmt: skip
    expect(page.get_by_label("Chat")).to_be_checked()
    expect(page.get_by_label("Message")).to_have_value(re.compile("speculative decoding"))
    page.get_by_label("Method").select_option("suffix")
    page.get_by_label("Guess in every step").check()
    seen.run("hello", guesses="6", temperature="0", top_p="0.9", max_tokens="20")
    seen.ends("Identical texts")
    body = seen.mock.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["speculative"] == {"method": "suffix", "num_speculative_tokens": 6, "always": True}
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["logprobs"]) == (0, 0.9, 20, True)
    assert body["model"] == "mock"


@in_depth
def test_shape_and_verifier_reach_the_server_so_that_a_tree_can_be_asked_for(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    expect(page.locator("#shape option").first).to_have_text("default: chain")
    expect(page.locator("#verify option").first).to_have_text("default: coupled")
    page.get_by_label("Shape").select_option("static/branching=3x2x1")
    page.get_by_label("Verifier").select_option("rejection")
    seen.run("[other]", max_tokens="20")
    seen.ends("The texts differ")
    assert seen.mock.bodies[0]["speculative"] == {"shape": "static/branching=3x2x1", "verify": "rejection"}
    assert "rejection keeps the distribution, not the text." in page.inner_text("#verdict-note")
    page.get_by_label("Verifier").select_option("typical")
    seen.run("[other]", max_tokens="20")
    expect(page.locator("#verdict-note")).to_contain_text("typical is lossy: it changes the distribution.")


def test_shapes_and_verifiers_of_the_page_are_what_the_library_has() -> None:
    from foretell import VERIFIERS, speculative_config

    def choices(name: str) -> list[str]:
        found = re.search(f'<select id="{name}">(.*?)</select>', web.page(), flags=re.S)
        assert found is not None
        options = re.findall(r"<option(?: value=\"([^\"]*)\")?>([^<]*)<", found[1])
        return [value or text for value, text in options if text != "default"]

    shapes, verifiers = choices("shape"), choices("verify")
    assert len(shapes) > 5
    for shape in shapes:
        assert speculative_config({"method": "draft_model", "shape": shape}).max_nodes <= 63
    for verifier in verifiers:
        assert speculative_config({"method": "draft_model", "verify": verifier}).verifier.name == verifier
    assert {*verifiers, "judge"} == set(VERIFIERS.names()), "a judge has weights: chosen where the server is started"


@in_depth
@pytest.mark.parametrize(
    ("method", "always", "words"),
    [
        ("draft_model", False, "Nothing was guessed: the server expects no gain from draft_model here."),
        (
            "draft_model",
            True,
            "Nothing was guessed: draft_model found nothing to propose in this text, or other requests",
        ),
        ("none", True, "Nothing was guessed: this server has no method of its own. Choose one in the form."),
    ],
)
def test_why_nothing_was_guessed_is_said(
    visit: Callable[..., Visit], mock: Mock, method: str, always: bool, words: str
) -> None:
    mock.method = method
    seen = visit()
    expect(seen.page.locator("#method option").first).to_have_text(f"default: {method}")
    seen.page.get_by_label("Guess in every step").set_checked(always)
    seen.run("[mute]", max_tokens="12")
    seen.ends("Identical texts")
    assert words in seen.page.inner_text("#verdict-note")
    hint = "“Guess in every step”, in the settings, shows guesses at once."
    assert (hint in seen.page.inner_text("#verdict-note")) == (not always and method != "none")
    mock.plain_reason = "guessing was not expected to pay here"
    seen.run("[mute]", max_tokens="12")
    expect(seen.page.locator("#verdict-note")).to_contain_text(
        "Nothing was guessed: guessing was not expected to pay here."
    )
    seen.run("fine", max_tokens="12")
    seen.ends("Identical texts")
    assert "Nothing was guessed" not in seen.page.inner_text("#verdict-note")


@in_depth
def test_the_step_shown_at_the_end_is_the_last_that_guessed(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[tail]")
    seen.ends("Identical texts")
    tree = seen.page.locator("#tree svg")
    expect(tree).to_have_attribute("aria-label", re.compile(r"^Step \d+: 7 guesses"))
    expect(seen.page.locator("#tree-title")).to_have_text("The last step that guessed")
    shown, last = (int(seen.page.locator("#step").evaluate(f"element => element.{name}")) for name in ("value", "max"))
    assert shown < last
    seen.page.locator("#step").press("End")
    expect(seen.page.locator("#tree-title")).to_have_text("The last step")
    expect(tree).to_have_attribute("aria-label", re.compile("nothing guessed"))


@in_depth
def test_without_comparison_or_speculation_there_is_one_run(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.get_by_label("Method").select_option("none")
    for name in ("guesses", "shape", "verify", "always", "compare"):
        expect(seen.page.locator(f"#{name}")).to_be_disabled()
    seen.run("x", max_tokens="9")
    seen.ends("9 tokens in 9 steps.")
    assert len(seen.mock.bodies) == 1
    assert seen.page.inner_text("#guessed-title") == "Without speculation"
    expect(seen.page.locator("#plain")).to_be_hidden()
    assert seen.page.locator("#guessed .token.plain").count() == 9


@needs_chromium
def test_texts_that_differ_are_said_and_marked(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[other]")
    seen.ends("The texts differ from character")
    marked = [seen.page.locator(f"#{pane} .token.differs").text_content() for pane in ("guessed", "plain")]
    assert marked[0] != marked[1]
    assert marked[1] == " other"


@in_depth
def test_sources_differ_in_colour_and_in_line(visit: Callable[..., Visit]) -> None:
    for scheme in ("light", "dark"):
        seen = visit(scheme=scheme)
        seen.run("x", max_tokens="40")
        seen.ends("Identical texts")
        tokens = ["#guessed .token.draft", "#guessed .token.bonus", "#plain .token.plain"]
        assert len({seen.style(token, "color") for token in tokens}) == 3
        lines = {
            (seen.style(f"{t} span", "textDecorationLine"), seen.style(f"{t} span", "textDecorationStyle"))
            for t in tokens
        }
        assert len(lines) == 3
        assert seen.page.locator("#legend .token").count() == 3


@needs_chromium
def test_the_tree_shows_the_kept_path_and_follows_the_step_chosen(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("x")
    seen.ends("Identical texts")
    tree = seen.page.locator("#tree svg")
    expect(tree.locator(".node.kept")).to_have_count(2)  # the 28th step accepts two
    expect(tree.locator(".edge.kept")).to_have_count(2)
    expect(tree.locator(".node.dropped")).to_have_count(5)
    expect(tree.locator(".node.bonus")).to_have_count(1)
    assert all("%" in text for text in tree.locator(".node.kept .amount, .node.dropped .amount").all_text_contents())
    assert "Step 28: 7 guesses, 2 accepted" in (tree.get_attribute("aria-label") or "")
    widths = {seen.style(f"#tree .edge.{kind}", "strokeWidth") for kind in ("kept", "dropped")}
    assert len(widths) == 2
    seen.page.locator("#step").press("Home")
    expect(tree).to_have_attribute("aria-label", re.compile("^Step 1: 7 guesses, 2 accepted"))
    assert seen.page.locator("#guessed .of-step").all_text_contents() == ["    if", " n", " <"]
    seen.page.locator("#guessed .token").nth(4).click()  # the second step's
    expect(tree).to_have_attribute("aria-label", re.compile("^Step 2: 7 guesses, 4 accepted"))
    boxes = tree.locator(".node").evaluate_all("nodes => nodes.map(node => node.getAttribute('transform'))")
    assert len(set(boxes)) == len(boxes), "boxes on top of each other"


@in_depth
def test_a_guess_that_ends_the_text_is_drawn_as_accepted(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[guessed]")
    seen.ends("Identical texts")
    tree = seen.page.locator("#tree svg")
    expect(tree).to_have_attribute("aria-label", "Step 28: 7 guesses, 3 accepted: ·5, ], ↵")
    expect(tree.locator(".node.kept")).to_have_count(3)
    expect(tree.locator(".node.bonus")).to_have_count(0)


@in_depth
def test_a_step_without_a_bonus_shows_none(visit: Callable[..., Visit], mock: Mock) -> None:
    """The server tells null where a guess ended the text; the page drew a token "#null"."""
    mock.tells_no_bonus = True
    seen = visit()
    seen.run("[guessed]")
    seen.ends("Identical texts")
    tree = seen.page.locator("#tree svg")
    expect(tree).to_have_attribute("aria-label", "Step 28: 7 guesses, 3 accepted: ·5, ], ↵")
    expect(tree.locator(".node.bonus")).to_have_count(0)


@in_depth
def test_a_token_tells_about_itself(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("x", max_tokens="30")
    seen.ends("Identical texts")
    tip = seen.page.locator("#tip")
    seen.page.hover("#guessed .token.draft >> nth=1")
    for words in ("·n", f"id {token_id(' n')}", "accepted guess of draft_model", "log probability −", "step 1"):
        expect(tip).to_contain_text(words)
    seen.page.mouse.move(2, 2)
    expect(tip).to_be_hidden()
    seen.page.locator("#guessed .output").focus()
    for _ in range(3):
        seen.page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("the model’s own, after the guesses")
    expect(seen.page.locator("#guessed .token.cursor")).to_have_text(" <")
    seen.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


@needs_chromium
def test_html_that_a_model_writes_stays_text(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[markup]")
    seen.ends("Identical texts")
    assert "<script>" in (seen.page.locator("#guessed .output").text_content() or "")
    assert seen.page.locator("#results img, #results script, #results b").count() == 0
    assert seen.page.title() != "owned"
    assert not seen.complaints


@in_depth
def test_a_server_that_tells_no_tokens_still_streams(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[chunks]")
    seen.ends("Identical texts")
    assert seen.page.locator("#guessed .output").text_content() == TEXT
    assert not seen.complaints


@needs_chromium
def test_a_long_text_is_drawn_in_few_pieces(visit: Callable[..., Visit]) -> None:
    """Every chunk was laid out as it came: after 4,000 tokens the page showed 70 tokens a second of 340."""
    seen = visit()
    seen.page.evaluate("""() => {
        window.drawn = 0;
        new MutationObserver(() => { window.drawn += 1; }).observe(guessed.output, { childList: true, subtree: true });
    }""")
    seen.page.get_by_label("Then the same without").uncheck()
    seen.run("[burst]", max_tokens="5000")
    seen.ends("tokens in")
    assert seen.page.locator("#guessed .output").text_content() == TEXT * 20
    num_steps = int(seen.page.inner_text("#guessed [data-figure=steps] dd"))
    assert num_steps > 500
    assert seen.page.evaluate("window.drawn") < num_steps / 2


@needs_chromium
def test_a_thought_is_shown_apart_open_while_it_comes_and_folded_then(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.template = "a template"
    seen = visit()
    page = seen.page
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => {
          const thought = guessed.thought;
          if (thought) window.seen.push([thought.element.open, thought.summary.textContent, guessed.isThinking]);
        }).observe(guessed.output, { childList: true, subtree: true, attributes: true });
    }""")
    seen.run("[think]")
    seen.ends("Identical texts")
    assert "separate_reasoning" not in seen.mock.bodies[0]
    during = [words for is_open, words, is_thinking in page.evaluate("window.seen") if is_open and is_thinking]
    assert any(re.fullmatch(r"Thinking: \d+ tokens", words) for words in during)
    for pane in ("guessed", "plain"):
        thought = page.locator(f"#{pane} .output > details")
        expect(thought.locator("summary")).to_have_text(f"Thought for {len(cut(THOUGHT))} tokens")
        expect(thought).not_to_have_attribute("open", re.compile(".*"))
        assert thought.locator("div").text_content() == THOUGHT
        answer = "".join(page.locator(f"#{pane} .output > .token").all_text_contents())
        assert answer == TEXT.lstrip()
    # However a chunk joined the two, each token has its own text; blanks beside the thought belong to its form.
    own = page.evaluate("guessed.spans.map((span, nth) => [guessed.tokens[nth].token, span.textContent])")
    tokens = [told for told, _ in own]
    assert [token for token in tokens if "think>" in token] == ["<think>", "</think>"]
    begin, end = tokens.index("<think>") + 2, tokens.index("</think>") - 1
    assert [token for token, text in own[begin:end] if token.strip() != text.strip()] == []
    assert [token for token, text in own[end + 5 :] if token != text] == []
    page.locator("#guessed summary").click()
    expect(page.locator("#guessed .thought div")).to_be_visible()
    assert not seen.complaints


@in_depth
def test_a_thought_that_is_cut_off_stays_open_and_one_chosen_stays_as_it_is(
    visit: Callable[..., Visit], mock: Mock
) -> None:
    mock.template = "a template"
    seen = visit()
    page = seen.page
    seen.run("[think]", max_tokens="12")
    seen.ends("Identical texts")
    expect(page.locator("#guessed summary")).to_have_text("Thought for 10 tokens")
    expect(page.locator("#guessed .thought div")).to_be_visible()
    page.locator("#guessed .output").focus()
    page.keyboard.press("End")
    expect(page.locator("#tip")).to_contain_text("step")
    seen.run("[think] [slow]", max_tokens="60")
    page.locator("#guessed summary").click()  # folded by hand, opened again
    expect(page.locator("#guessed .thought div")).to_be_hidden()
    page.locator("#guessed summary").click()
    seen.ends("Identical texts")
    expect(page.locator("#guessed .thought div")).to_be_visible()
    expect(page.locator("#plain .thought div")).to_be_hidden()


@in_depth
def test_a_difference_within_a_thought_is_shown(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.template = "a template"
    seen = visit()
    seen.run("[think] [other]")
    seen.ends("The texts differ from character")
    expect(seen.page.locator("#guessed .thought .differs")).to_be_visible()
    expect(seen.page.locator("#plain .thought .differs")).to_have_text(" other")


@in_depth
def test_what_makes_the_runs_unlike_is_said(visit: Callable[..., Visit], mock: Mock) -> None:
    """The second run finds the prompt read: its first token looked ten times as fast as that of the first."""
    mock.num_cached = 8
    seen = visit()
    seen.run("[full]")
    seen.ends("Identical texts")
    known = "8 of the prompt’s 9 were known from an earlier run, so its first token came sooner"
    expect(seen.page.locator("#plain .ended")).to_contain_text(f"cut where the model’s context is full; {known}")
    assert "known" not in seen.page.inner_text("#guessed .ended")


@in_depth
def test_characters_are_counted_whole_where_texts_differ(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.evaluate("[guessed.text, plain.text] = ['\\u{1f600}ab', '\\u{1f600}ac']")
    assert seen.page.evaluate("conclude(true, 1)").startswith("The texts differ from character 3 on")


@in_depth
def test_methods_that_the_page_does_not_list_can_be_chosen(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.methods = ("draft_model", "hybrid", "none", "prediction")
    seen = visit()
    options = seen.page.locator("#method option")
    expect(options).to_have_text(["default: draft_model", "draft_model", "hybrid", "none: plain decoding"])
    seen.page.get_by_label("Method").select_option("hybrid")
    seen.run("x", max_tokens="9")
    seen.ends("Identical texts")
    assert seen.mock.bodies[0]["speculative"]["method"] == "hybrid"


@in_depth
def test_the_end_of_learning_is_said(visit: Callable[..., Visit]) -> None:
    figures = {"num_swaps": 1, "num_refused": 2, "num_reverts": 0}
    state = {"history": [], "events": [], "figures": figures, "failure": "the trainer died", "paused": False}
    said = visit().page.evaluate("(state) => drawLearning(state).said", state)
    assert said == "no guesses yet; 1 swapped in, 2 refused, 0 taken back. Learning has ended: the trainer died"


@in_depth
@pytest.mark.parametrize("width", [360, 1280])
def test_what_was_learned_is_drawn_at_its_size(visit: Callable[..., Visit], width: int) -> None:
    """It stood below the form, a column of 20 rem, with letters of five pixels, as on a phone."""
    seen = visit(size={"width": width, "height": 740})
    figures = {"num_swaps": 1, "num_refused": 0, "num_reverts": 0}
    history = [{"number": number, "guessed": 9, "kept": 4} for number in range(40)]
    state = {
        "history": history,
        "events": [{"event": "swap", "request": 20}],
        "figures": figures,
        "failure": "",
        "paused": True,
    }
    seen.page.route("**/v1/foretell/learner", lambda route: route.fulfill(json=state))
    seen.page.evaluate("polling = clearInterval(polling)")  # else the next gauges, of what does not learn, hide it
    seen.page.evaluate("showLearning(at('learning'), '', true)")
    plot = seen.page.locator("#learning svg")
    expect(plot).to_be_visible()
    expect(seen.page.locator("#learning")).to_contain_text("1 swapped in, 0 refused, 0 taken back. Learning is paused")
    height = plot.locator("text").first.evaluate("element => element.getBoundingClientRect().height")
    assert height > 9, "too small to be read"
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    left = [seen.page.evaluate(f"at('{one}').getBoundingClientRect().left") for one in ("learning", "results")]
    assert left[0] == left[1]
    top = [seen.page.evaluate(f"at('{one}').getBoundingClientRect().top") for one in ("learning", "apart", "toy")]
    assert top == sorted(top), "what is learned of real requests stands above the game"


# ---- what is asked of which model


@needs_chromium
def test_an_instruct_model_is_asked_in_a_chat_and_another_is_not(visit: Callable[..., Visit], mock: Mock) -> None:
    """The page opened on plain text for a model that expects messages."""
    seen = visit()
    expect(seen.page.get_by_label("Chat")).to_be_disabled()
    expect(seen.page.get_by_label("Plain text")).to_be_checked()
    expect(seen.page.get_by_label("Text to continue")).to_have_value(re.compile("def fibonacci"))
    mock.template = "a template"
    seen.page.reload()
    expect(seen.page.get_by_label("Chat")).to_be_enabled()
    expect(seen.page.get_by_label("Message")).to_have_value(re.compile("speculative decoding"))
    seen.page.get_by_label("Plain text").check()
    expect(seen.page.get_by_label("Text to continue")).to_have_value(re.compile("def fibonacci"))
    seen.run("mine", max_tokens="9")
    seen.ends("Identical texts")
    assert seen.mock.bodies[0]["prompt"] == "mine"
    seen.page.get_by_label("Chat").check()
    expect(seen.page.get_by_label("Message")).to_have_value("mine")  # what was written is not replaced


@needs_chromium
def test_models_adapters_and_thoughts_can_be_chosen(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.template = "a template"
    thinks = {"template": "a template", "capabilities": ["completion", "thinking"]}
    mock.more = [
        {"id": "law", "parent": "mock", "speculative": {"method": "none"}, "methods": ["ngram"]},
        {"id": "base", "show": {"template": ""}},
        {"id": "deep", "speculative": {}, "methods": [], "status": {"value": "unloaded"}, "show": thinks},
    ]
    seen = visit()
    page = seen.page
    choice = page.locator("#model")
    assert choice.locator("option").all_inner_texts() == [
        "mock", "law, adapter of mock", "base", "deep, loaded when it is asked",
    ]  # fmt: skip
    page.get_by_label("Method").select_option("ngram")
    choice.select_option("law")
    expect(page.locator("#method option")).to_have_text(["default: none", "ngram", "none: plain decoding"])
    expect(page.get_by_label("Method")).to_have_value("ngram")
    choice.select_option("base")
    expect(page.get_by_label("Plain text")).to_be_checked()
    expect(page.get_by_label("Most tokens of its thought")).to_be_hidden()
    choice.select_option("deep")
    expect(page.get_by_label("Chat")).to_be_checked()
    expect(page.locator("#method option")).to_have_count(11)  # it is not loaded: nobody knows
    for most, told in (("", {}), ("40", {"thinking_budget": 40}), ("0", {"enable_thinking": False})):
        seen.run("[think]", thought=most, max_tokens="20")
        seen.ends("Identical texts")
        page.evaluate("say('')")  # else the next end is found before it comes
        body = seen.mock.bodies[-1]
        assert {key: body[key] for key in ("thinking_budget", "enable_thinking") if key in body} == told
        assert body["model"] == "deep"
    assert page.title() == "deep · foretell"
    assert not seen.complaints


@in_depth
def test_of_several_models_the_chosen_ones_figures_are_shown(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.more = [{"id": "other", "status": {"value": "loaded"}}]
    seen = visit()
    seen.page.locator("#model").select_option("other")
    seen.page.evaluate("loading.then(poll)")
    expect(seen.page.locator("#gauges dd").first).to_have_text("unknown")
    expect(seen.page.locator("#plan")).to_be_hidden()


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_the_answer_follows_the_prompt(visit: Callable[..., Visit], width: int) -> None:
    """On a phone all settings stood between them, and the page was 4,080 pixels long."""
    seen = visit(size={"width": width, "height": 860})
    page = seen.page
    is_wide = width > 1000
    expect(page.locator("#settings-told")).to_have_text(
        "Settings: method draft_model, temperature 0.7, 128 tokens at most"
    )
    assert page.locator("#temperature").is_visible() == page.locator("#toy-one").is_visible() == is_wide
    if not is_wide:
        assert page.evaluate("at('verdict').getBoundingClientRect().bottom") < 860
        assert page.evaluate("document.documentElement.scrollHeight") < 2000
        page.locator("#settings-told").press("Enter")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Temperature").press("Tab")
    page.get_by_label("Seed").fill("-1")
    if not is_wide:
        page.locator("#settings-told").press("Enter")
    seen.run("x")
    expect(page.get_by_label("Seed")).to_be_focused()  # it is shown what cannot be sent
    page.get_by_label("Seed").fill("7")
    expect(page.locator("#settings-told")).to_contain_text("temperature 0,")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    seen.run("x", max_tokens="9")
    seen.ends("Identical texts")
    assert seen.mock.bodies[0]["temperature"] == 0


@in_depth
def test_a_speedup_is_said_of_a_run_that_guessed_alone(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.run("[mute]", max_tokens="12")
    seen.ends("Identical texts, as nothing was guessed.")


# ---- one step, taken apart, and the game


@needs_chromium
def test_a_step_is_read_page_by_page_with_the_keyboard(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.fill("#prompt", "def add(a, b):")
    page.fill("#seed", "7")
    page.fill("#top_p", "0.9")
    page.locator("#apart-run").focus()
    page.keyboard.press("Enter")
    stage = page.locator("#apart-stage")
    expect(stage.locator("h3")).to_have_text("The text so far")
    assert seen.mock.explained == [
        {"prompt": "def add(a, b):", "chat": False, "temperature": 0.7, "top_p": 0.9, "seed": 7, "model": "mock"}
    ]
    page.locator("#apart-next").focus()
    titles = []
    for _ in range(6):
        titles.append(stage.locator("h3").inner_text())
        page.keyboard.press("Enter")
    assert titles == [
        "The text so far", "Guess", "Check", "What comes after the text so far?", "What comes after the guess ·a?",
        "What came of it",
    ]  # fmt: skip
    assert seen.focused() == "apart-next"
    expect(stage.locator("h3")).to_have_text("The text so far")  # from the start
    page.locator("#apart-back").press("Enter")
    expect(page.locator("#apart-place")).to_have_text("1 of 6")  # there is nothing before it
    assert not seen.complaints


@needs_chromium
def test_a_place_shows_laws_races_and_what_won(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.locator("#apart-run").click()
    for _ in range(4):
        page.locator("#apart-next").click()
    table = page.locator("#apart-stage table")
    assert table.locator("thead th").all_text_contents() == [
        "token",
        "p, target",
        "q, drafter",
        "time, target",
        "time, drafter",
    ]
    assert table.locator("tbody .piece").all_text_contents() == ["↵", "<b>", "·+"]
    assert table.locator("tr.won .piece").all_text_contents() == ["↵"]
    widths = table.locator("td.target .fill").evaluate_all("bars => bars.map((bar) => bar.style.width)")
    assert widths == ["70%", "10%", "0%"]
    assert table.locator("td.time").all_text_contents()[:2] == ["0.30 first", "0.30"]
    assert table.locator("td.time").all_text_contents()[-2:] == ["never", "never"]
    expect(page.locator("#apart-stage .outcome.dropped")).to_have_text("dropped: b")
    page.locator("#apart-next").click()
    tree = page.locator("#apart-stage svg")
    expect(tree.locator(".node.kept")).to_have_count(1)
    expect(tree.locator(".node.bonus")).to_have_count(1)
    page.locator("#apart-step").select_option("1")
    page.locator("#apart-next").click()
    expect(page.locator("#apart-stage svg")).to_have_count(0)  # nothing was guessed


@needs_chromium
def test_a_refused_explanation_is_said(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.fill("#prompt", "[busy]")
    seen.page.locator("#apart-run").click()
    expect(seen.page.locator("#apart-error")).to_contain_text("Try again in 1 s")
    expect(seen.page.locator("#apart-stage")).to_be_hidden()
    seen.page.fill("#prompt", "x")
    seen.page.locator("#apart-run").click()
    expect(seen.page.locator("#apart-stage")).to_be_visible()
    expect(seen.page.locator("#apart-error")).to_be_hidden()


@needs_chromium
def test_the_game_agrees_always_by_one_list_and_in_a_tenth_by_two(visit: Callable[..., Visit]) -> None:
    """2,001 rounds: a list each agrees in 10 %, its standard error 0.67 %; five of them have a false-alarm rate of 6e-7."""
    seen = visit()
    page = seen.page
    page.locator("#toy-one").press("Enter")
    expect(page.locator("#toy .won")).to_have_count(4)
    for _ in range(2):
        page.locator("#toy-many").press("Enter")

    def shares() -> list[float]:
        return [float(one) for one in re.findall(r"([\d.]+) %", page.inner_text("#toy-said"))]

    assert page.inner_text("#toy-said").startswith("2001 rounds")
    assert shares()[0] == 100.0
    assert abs(shares()[1] - 10.0) < 5 * 0.67
    page.locator("#toy-likes").press("End")
    expect(page.locator("#toy-said")).to_have_text("No round was played yet.")
    page.locator("#toy-many").press("Enter")
    assert shares()[0] < 20.0, "a friend who always takes the 7 agrees as often as the 7 comes"
    assert not seen.complaints


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_step_apart_fits_and_is_legible(visit: Callable[..., Visit], scheme: str) -> None:
    seen = visit(scheme=scheme)
    page = seen.page
    page.locator("#toy-one").click()
    page.locator("#apart-run").click()
    for _ in range(6):
        for width in (320, 1280):
            page.set_viewport_size({"width": width, "height": 740})
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate(SPILLS) == []
            poor = [found for found in page.evaluate(POOR_CONTRAST) if not found.startswith("only")]
            assert not poor, poor
        page.locator("#apart-next").click()


# ---- what goes wrong


@in_depth
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("[busy]", "The server is busy and took no more requests (429). Try again in 7 s. The server says: the queue"),
        ("[refused]", "The server refused the request (400). The server says: method 'eagle3' is not loaded"),
        ("[lost]", "The connection was lost: the text ends where it was cut."),
    ],
)
def test_errors_are_said_plainly(visit: Callable[..., Visit], prompt: str, words: str) -> None:
    seen = visit()
    seen.run(prompt)
    seen.ends("Failed")
    expect(seen.page.get_by_role("alert")).to_contain_text(words)
    expect(seen.page.locator("#run")).to_be_enabled()
    assert len(seen.mock.bodies) == 1, "after an error the second run makes no sense"
    seen.run("fine now", max_tokens="9")
    seen.ends("Identical texts")
    expect(seen.page.locator("#error")).to_be_hidden()


@in_depth
def test_no_server_at_all(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.route("**/v1/completions", lambda route: route.abort("connectionrefused"))
    seen.run("x")
    seen.ends("Failed")
    expect(seen.page.get_by_role("alert")).to_contain_text("There is no connection to the server.")


@needs_chromium
def test_the_key_is_asked_for_sent_and_kept_in_the_tab_alone(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.key = "sesame"
    seen = visit()
    page = seen.page
    expect(page.locator("#ask")).to_have_text("This server asks for an API key. Enter it under “API key”, then run.")
    expect(page.locator("#error")).to_be_hidden()  # nothing is wrong yet
    assert seen.focused() == "key"
    page.keyboard.type("guess")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert")).to_contain_text("did not accept the API key (401)")
    expect(page.locator("#ask")).to_be_hidden()
    expect(page.locator("#run")).to_be_enabled()
    page.fill("#key", "sesame")
    page.keyboard.press("Control+Enter")
    seen.ends("Identical texts")
    expect(page.locator("#error")).to_be_hidden()
    assert page.evaluate("sessionStorage.getItem('foretell-key')") == "sesame"
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)") + page.evaluate("document.cookie + location")
    page.reload()
    expect(page.locator("#key")).to_have_value("sesame")


@in_depth
def test_a_copied_key_loses_its_blanks_and_an_impossible_one_is_named(visit: Callable[..., Visit], mock: Mock) -> None:
    """A key with an accent was told as "There is no connection to the server"."""
    mock.key = "sesame"
    seen = visit()
    seen.page.fill("#key", "sésame")
    seen.page.keyboard.press("Control+Enter")
    expect(seen.page.get_by_role("alert")).to_contain_text("The API key has a character that no key can have")
    seen.page.fill("#key", " sesame ")
    seen.page.keyboard.press("Control+Enter")
    seen.ends("Identical texts")


@in_depth
def test_stop_works_before_the_server_has_told_its_model(visit: Callable[..., Visit], mock: Mock) -> None:
    mock.models_after_s = 60.0
    seen = visit()
    seen.run("x")
    expect(seen.page.locator("#status")).to_have_text("")
    seen.page.locator("#stop").click()
    seen.ends("Stopped.")
    expect(seen.page.locator("#run")).to_be_enabled()
    assert not seen.mock.bodies


@in_depth
def test_a_run_waits_for_the_models_name(visit: Callable[..., Visit], mock: Mock) -> None:
    """A run right after the key was typed was sent without a model, and refused."""
    mock.models_after_s = 1.0
    seen = visit()
    seen.run("x", max_tokens="9")
    seen.ends("Identical texts")
    assert [body["model"] for body in seen.mock.bodies] == ["mock", "mock"]


@in_depth
def test_gauges_show_what_the_server_measures_and_hide_without(visit: Callable[..., Visit], mock: Mock) -> None:
    seen = visit()
    told = seen.page.locator("#gauges dd")
    lost = "3.50 × (guesses −1.00, shape −0.00, time −0.50, width −0.13)"
    expect(told).to_have_text(["1.87 ×", lost, "1", "0"])
    mock.knows_speedup = False
    seen.page.reload()
    expect(told).to_have_text(["unknown", "unknown", "1", "0"])
    mock.has_metrics = False
    seen.page.reload()
    expect(seen.page.locator("#status")).to_have_text("")
    expect(seen.page.locator("#gauges")).to_be_hidden()


@in_depth
def test_the_plan_is_a_table_by_length_and_number_of_requests(visit: Callable[..., Visit], mock: Mock) -> None:
    seen = visit()
    seen.page.click("#plan summary")
    rows = [" ".join(row.split()) for row in seen.page.inner_text("#plan table").splitlines() if row.strip()]
    assert rows == [
        "eagle3: guesses, and the speedup expected of them", "tokens of text 1 at once 8 at once", "256 3 (1.50 ×) none",
        "8192 1 (1.23 ×) none",
    ]  # fmt: skip
    mock.has_metrics = False
    seen.page.reload()
    expect(seen.page.locator("#plan")).to_be_hidden()


@in_depth
def test_gauges_come_back_with_the_server(visit: Callable[..., Visit]) -> None:
    """One lost connection ended the asking for good."""
    seen = visit()
    seen.page.clock.install()
    seen.page.reload()
    gauges = seen.page.locator("#gauges")
    expect(gauges).to_be_visible()
    seen.page.route("**/metrics", lambda route: route.abort("connectionrefused"))
    seen.page.clock.fast_forward(5_100)
    expect(gauges).to_be_hidden()
    seen.page.unroute("**/metrics")
    seen.page.clock.fast_forward(5_100)
    expect(gauges).to_be_visible()


# ---- keyboard, looks


@in_depth
def test_everything_is_done_with_the_keyboard(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    expect(page.locator("#plan")).to_be_visible()  # it comes with the gauges
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        where = seen.focused()
        if where == "body":
            break  # past the last one, at the browser's own controls
        reached.append(where)
        if where == "prompt":
            assert seen.style("#prompt", "outlineStyle") == "solid", "the focus is not seen"
    speculation = ["method", "guesses", "shape", "verify", "always", "compare"]
    parameters = [*speculation, "temperature", "top_p", "max_tokens", "seed", "key-details"]
    slowly = ["apart-run", "toy", "toy-one", "toy-many", "toy-likes"]
    expected = [
        "skip",
        "theme",
        "plan",
        "form",
        "model",
        "prompt",
        "run",
        "settings-told",
        *parameters,
        "guessed",
        "plain",
        "tree-scroll",
        *slowly,
    ]
    assert reached == expected


@in_depth
def test_the_skip_link_leads_to_the_result(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.keyboard.press("Tab")
    expect(seen.page.get_by_role("link", name="Skip to the result")).to_be_focused()
    seen.page.keyboard.press("Enter")
    assert seen.focused() == "results"


@in_depth
def test_escape_stops_and_the_server_hears_of_it(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.fill("#prompt", "[slow]")
    page.fill("#max_tokens", "2000")
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    expect(page.locator("#guessed .token").nth(5)).to_be_attached()
    expect(page.locator("#status")).to_have_text("Running with speculation…")  # a reader hears this, not every token
    assert page.locator("#guessed .output").get_attribute("aria-live") is None
    page.keyboard.press("Escape")
    seen.ends("Stopped.")
    expect(page.locator("#guessed .ended")).to_contain_text("tokens, stopped")
    expect(page.locator("#run")).to_be_focused()
    assert len(seen.mock.bodies) == 1
    for _ in range(100):
        if seen.mock.cancelled:
            break
        page.wait_for_timeout(50)
    assert seen.mock.cancelled == 1


@in_depth
def test_the_theme_follows_the_system_until_it_is_chosen(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit(scheme="dark")
    page = seen.page
    dark = brightness(page.screenshot(path=tmp_path / "dark.png"))
    page.get_by_role("button", name="Switch to the light theme").click()
    light = brightness(page.screenshot(path=tmp_path / "light.png"))
    assert dark[0] < 60 < 190 < light[0]
    assert min(dark[1], light[1]) > 5, "nothing is drawn"
    page.reload()
    expect(page.get_by_role("button", name="Switch to the dark theme")).to_be_visible()
    assert page.evaluate("localStorage.getItem('foretell-theme')") == "light"
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate("localStorage.getItem('foretell-theme')") is None, "the system's again"
    page.emulate_media(color_scheme="light")
    expect(page.get_by_role("button", name="Switch to the dark theme")).to_be_visible()
    assert not seen.complaints


@in_depth
@pytest.mark.parametrize("width", [320, 360, 800, 1280])
def test_no_width_scrolls_sideways(visit: Callable[..., Visit], width: int, tmp_path: Path) -> None:
    seen = visit(size={"width": width, "height": 740})
    seen.run("[markup]")
    seen.ends("Identical texts")
    seen.page.locator("#guessed .token.draft").last.hover()
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.page.evaluate(SPILLS) == []
    assert brightness(seen.page.screenshot(path=tmp_path / "narrow.png", full_page=True))[1] > 5


@in_depth
def test_contrast_is_enough_in_both_themes(visit: Callable[..., Visit]) -> None:
    for scheme in ("light", "dark"):
        seen = visit(scheme=scheme)
        seen.run("x", max_tokens="30")
        seen.ends("Identical texts")
        seen.page.fill("#prompt", "[refused]")
        poor = [f"{scheme}: {found}" for found in seen.page.evaluate(POOR_CONTRAST)]
        assert not poor, poor


@in_depth
def test_every_control_has_a_name(visit: Callable[..., Visit]) -> None:
    seen = visit()
    nameless = seen.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(it => !(it.labels?.length || it.textContent.trim() || it.ariaLabel)).map(it => it.id)"
    )
    assert nameless == []


# Ids or classes of elements that stand out of the window, those inside a box that scrolls excepted.
SPILLS = """
[...document.body.querySelectorAll("*")]
  .filter((it) => !it.closest(".scroll, .skip, [hidden], details:not([open]) > :not(summary)"))
  .filter((it) => it.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((it) => it.id || it.getAttribute("class") || it.tagName)
"""

# Texts whose colour stands out from what is behind it by less than WCAG's 4.5 to 1.
POOR_CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b]
    .map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const behind = (it) => {
    for (; it; it = it.parentElement) {
      const box = it.matches("g.node") ? getComputedStyle(it.querySelector("rect")).fill : "none";
      const found = rgba(box === "none" ? getComputedStyle(it).backgroundColor : box);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  let seen = 0;
  for (const it of document.body.querySelectorAll("*")) {
    if (it.matches("script, noscript, title") || !it.checkVisibility()) continue;
    if (![...it.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
    const style = getComputedStyle(it);
    const [a, b] = [luminance(rgba(it.closest("svg") ? style.fill : style.color)), luminance(behind(it))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.push(`${it.textContent.trim().slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return seen > 60 ? poor : [`only ${seen} texts were found`];
})()
"""


def brightness(png: bytes) -> tuple[float, float]:
    """Mean and standard deviation of a picture's grey values, 0 to 255."""
    image = pytest.importorskip("PIL.Image", reason="pictures are judged with Pillow")
    statistics = pytest.importorskip("PIL.ImageStat").Stat(image.open(io.BytesIO(png)).convert("L"))
    return statistics.mean[0], statistics.stddev[0]
