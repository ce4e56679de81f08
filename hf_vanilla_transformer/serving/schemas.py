"""The bodies of requests and answers. `/openapi.json` and `/docs` describe these models."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class TranslateRequest(BaseModel):
    """The body of `POST /translate`. Unknown fields are ignored, as LibreTranslate ignores them."""

    q: str | list[str] = Field(description="a text, or in JSON a list of texts")
    source: str = Field(min_length=1, description="a language code of GET /languages, or auto")
    target: str = Field(min_length=1, description="a language code of GET /languages")
    format: Literal["text", "html"] = Field("text", description="text or html; HTML keeps its tags")
    alternatives: int = Field(0, ge=0, description="number of further translations, less than the server's beams")
    api_key: Any = Field(None, description="the key of the server, if it has one and the request has no bearer token")


class TranslateAnswer(BaseModel):
    """Translations: strings if `q` is a string, lists if it is a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = Field(None, description="the next best translations, if asked")


class Language(BaseModel):
    """A language, and the languages into which it can be translated."""

    code: str
    name: str
    targets: list[str]


class Health(BaseModel):
    """The state of the server."""

    status: Literal["ok"] = "ok"


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 4xx or 5xx."""

    error: str = Field(description="one sentence, which names the field")


class PageRequest(BaseModel):
    """The body of `POST /page/translate`."""

    text: str = Field(description="one sentence")
    num_beams: int | None = Field(None, ge=1, description="beam size; the default is the server's")
    alternatives: int = Field(5, ge=1, description="number of alternatives to each token")
    prefix: list[int] = Field([], description="token ids that the translation starts with")
    api_key: Any = Field(None, description="as in POST /translate")


class Token(BaseModel):
    """A token with its text."""

    id: int
    text: str


class Alternative(Token):
    """A token that could be at this position."""

    probability: float


class Hypothesis(BaseModel):
    """A hypothesis of the beam search. Greedy search has no score."""

    text: str
    score: float | None
    tokens: list[int]
    token_texts: list[str]


class PageTranslation(BaseModel):
    """A `Translation` of the page, as web/README.md defines it."""

    source: list[Token]
    text: str
    tokens: list[Token]
    probabilities: list[float]
    attention: list[list[list[list[float]]]] = Field(description="layers, heads, target tokens, source tokens")
    alternatives: list[list[Alternative]]
    hypotheses: list[Hypothesis]
