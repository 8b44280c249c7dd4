"""Request fields: those of OpenAI, of vLLM, and foretell's own. The OpenAPI document is generated from these models.

A field that is not here is refused, unless its value changes nothing (see ``unsupported``). Fields marked "ignored" have
no effect: they are accepted because clients send them. Of a list only the first fault is looked for (``fail_fast``): a
body of megabytes may have a million, and finding them holds up the event loop.

fields, sampling, formats, tools and messages hold the parts; requests and responses whole bodies.
"""
