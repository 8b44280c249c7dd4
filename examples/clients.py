"""One question to a running server by several clients: openai, LangChain, litellm; what is not installed is left out.

foretell serve &
python examples/clients.py http://127.0.0.1:8000
"""

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

QUESTION = "Name a colour."
SEED, TOKENS = 1, 24


def by_openai(url: str, model: str) -> str:
    """A conversation."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = [{"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(model=model, messages=asked, seed=SEED, max_tokens=TOKENS)  # type: ignore
    return reply.choices[0].message.content or ""


def by_responses(url: str, model: str) -> str:
    """The same in the newer form."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    return client.responses.create(
        model=model, input=QUESTION, max_output_tokens=TOKENS, extra_body={"seed": SEED}
    ).output_text


def by_langchain(url: str, model: str) -> str:
    """LangChain's client of OpenAI's API; further fields of a request go into extra_body."""
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, seed=SEED, max_tokens=TOKENS,
        extra_body={"speculative": {"method": "suffix"}},
    )  # fmt: skip
    return str(client.invoke(QUESTION).content)


def by_litellm(url: str, model: str) -> str:
    """litellm, which chooses its client by the name's prefix."""
    import litellm

    asked = [{"role": "user", "content": QUESTION}]
    reply = litellm.completion(
        model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", messages=asked, seed=SEED, max_tokens=TOKENS
    )
    return str(reply.choices[0].message.content)


CLIENTS: Mapping[str, tuple[str, Callable[[str, str], str]]] = {
    "openai": ("openai", by_openai),
    "openai, responses": ("openai", by_responses),
    "LangChain": ("langchain_openai", by_langchain),
    "litellm": ("litellm", by_litellm),
}


def main(url: str) -> int:
    """Ask by each; the same seed gives the same text, so the number of different answers is the exit status less one."""
    import httpx

    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    texts = set()
    for name, (package, ask) in CLIENTS.items():
        if find_spec(package) is None:
            print(f"{name:20} not installed: pip install {package.replace('_', '-')}")
            continue
        text = ask(url, model)
        texts.add(text)
        print(f"{name:20} {text!r}")
    return len(texts) - 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
