"""What a text must look like, under the names of several servers. ``server/texts/formats.py`` makes one wish of them."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from foretell.server.protocol.fields import Choices, Grammar, JsonObject, Strict, Text
from foretell.server.protocol.sampling import Sampling


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object; with a schema, as llama.cpp takes it, one of that."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema")


class JsonSchema(Strict):
    """A schema and its name, which changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ConstantTag(Strict):
    """One text alone."""

    type: Literal["const_string"]
    value: Text


class SchemaTag(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject


class RegexTag(Strict):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    pattern: Grammar


class GrammarTag(Strict):
    """Text of a grammar: EBNF ('::=') or Lark."""

    type: Literal["grammar"]
    grammar: Grammar


class TagFormat(Strict):
    """A structural tag, as XGrammar calls it: those that hold for the whole text."""

    type: Literal["structural_tag"]
    format: Annotated[ConstantTag | SchemaTag | RegexTag | GrammarTag, Field(discriminator="type")]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | TagFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's name of all formats: one of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    json_: str | JsonObject | None = Field(None, alias="json", description="A JSON schema.")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="EBNF ('::=') or Lark.")
    json_object: bool | None = None


class Formatted(Sampling):
    """What the text must look like. At most one may be given; the names are those of several servers."""

    response_format: ResponseFormat | None = None
    regex: Grammar | None = Field(None, description="A regular expression that the whole text matches (Rust's syntax).")
    ebnf: Grammar | None = Field(
        None, description="A grammar with '::=' and a rule 'root', as llama.cpp's and XGrammar's."
    )
    grammar: Grammar | None = Field(None, description="The same, as llama.cpp calls it.")
    json_schema: str | JsonObject | None = Field(None, description="A JSON schema, or its text.")
    guided_json: str | JsonObject | None = Field(None, description="The same, as vLLM called it.")
    guided_regex: Grammar | None = Field(None, description="regex, as vLLM called it.")
    guided_choice: Choices | None = Field(None, description="The text is one of these.")
    guided_grammar: Grammar | None = Field(None, description="EBNF ('::=') or Lark, as vLLM called it.")
    structured_outputs: StructuredOutputs | None = Field(None, description="One of these, as vLLM calls it.")
    return_token_ids: bool | None = Field(
        None, description="The ids of the prompt's and the output's tokens, as vLLM's."
    )
